"""The folder of adapters that peft loads, against the same adapters multiplied into the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.utils import transformers_weight_conversion as of_peft
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_megatron.options.lora import Adaptable, LoraSection
from rl_megatron.weights.adapters.files import OF_EXPERTS_ALONE, PREFIX, WITH_EXPERTS, peft_config
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.lora import hf_adapter_name, hf_adapters, ranks_of_parts
from tests.family_models import MODELS, save_model
from tests.saved_adapters import save_adapters
from tools.conversion import run

ALL: tuple[Adaptable, ...] = ("attention", "mlp", "experts")


def log_probs(folder: Path, adapters: Path | None = None) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters is not None:
        model = PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        said: Tensor = model.eval()(input_ids=torch.arange(1, 33)[None]).logits.log_softmax(-1)
    return said


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # experts, where they have none: peft makes some of 0
@pytest.mark.parametrize(
    ("name", "targets", "expert_rank"),
    [
        ("glm4_moe", ("mlp",), None),
        ("glm4_moe_lite", ALL, 2),
        ("deepseek_v3", ALL, None),
        ("qwen3_next", ("mlp",), None),
        ("hy_v3", ("attention", "mlp"), None),
    ],
)
def test_peft_loads_those_of_dense_layers_and_shared_experts(
    name: str, targets: tuple[Adaptable, ...], expert_rank: int | None, tmp_path: Path
) -> None:
    """Measured: 6e-5 apart at most, where the adapters move log-probs by 6.7 to 8."""
    base, out = tmp_path / "base", tmp_path / "adapters"
    save_model(name, base)
    lora, shape = LoraSection(rank=4, expert_rank=expert_rank, alpha=16, targets=targets), read_shape(base)
    ranks = ranks_of_parts(megatron_layout(shape), lora)
    torch.manual_seed(0)
    sizes = hf_adapters(hf_layout(shape), ranks).local_shapes(0)
    adapters = {key: torch.randn(size) * 0.2 for key, size in sizes.items()}
    out.mkdir()
    save_file({PREFIX + key: tensor for key, tensor in adapters.items()}, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(peft_config(lora, shape, base)))
    plain, found = log_probs(base), log_probs(base, out)
    weights = load_file(base / "model.safetensors")
    for key in weights:
        if (a := adapters.get(hf_adapter_name(key, "A"))) is not None:
            weights[key] += 16 / len(a) * adapters[hf_adapter_name(key, "B")] @ a
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    merged = log_probs(base)
    assert float((merged - plain).abs().max()) > 1
    assert float((merged - found).abs().max()) < 1e-3


def test_its_families_are_those_of_peft() -> None:
    families = {family for family, _ in MODELS.values()}
    mapped = of_peft._MODEL_TO_CONVERSION_PATTERN
    names = {
        family for family in families if "gate_proj" in of_peft._MOE_TARGET_MODULE_MAPPING.get(mapped.get(family), {})
    }
    assert names == OF_EXPERTS_ALONE & families
    assert families >= OF_EXPERTS_ALONE
    assert families & WITH_EXPERTS == {one for one in families if mapped.get(one) in of_peft._MOE_TARGET_MODULE_MAPPING}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("name", ["hy_v3", "deepseek_v3", "minimax_m2"])
def test_convert_says_where_peft_leaves_out_adapters_of_experts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save_model(name, base)
    run(save_adapters(tmp_path / "adapters", read_shape(base)), out, config=base)
    said = capsys.readouterr().err
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    taken = any(bool(p.any()) for key, p in loaded.named_parameters() if ".experts." in key and "lora_B" in key)
    assert taken == (name != "hy_v3")
    assert taken is not ("leaves out the adapters of routed experts" in said and "--merge" in said)
