"""The folder of adapters that ``rl-megatron convert`` writes, in the real vLLM; transformers is the oracle.

Linears of a dense model: vLLM's kernels for experts' adapters, and all of SGLang's, need GPUs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_megatron.options.lora import LoraSection
from rl_megatron.weights.adapters.files import peft_config
from rl_megatron.weights.checkpoints.made_up import MadeUp
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.lora import hf_adapters, ranks_of_parts
from tests.engines.benches import interpreter
from tests.engines.conftest import needs
from tests.engines.learned import save_model
from tests.engines.reads_adapters import TEXT

LORA = LoraSection(rank=4, alpha=12.0)
LIMIT = 600.0


def test_vllm_computes_with_the_adapters_as_transformers_does_with_merged_weights(tmp_path: Path) -> None:
    """15 seconds."""
    needs("vllm")
    model = save_model("qwen2", tmp_path / "model", 1)
    shape = read_shape(model)
    shapes = hf_adapters(hf_layout(shape), ranks_of_parts(megatron_layout(shape), LORA)).local_shapes(0)
    drawn = MadeUp(model, shapes, 3)
    adapters = {name: drawn.read(name, tuple((0, n) for n in size)).mul_(3) for name, size in shapes.items()}
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_file({f"base_model.model.{name}": a for name, a in adapters.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(LORA, shape, model)))
    script, out = Path(__file__).with_name("reads_adapters.py"), tmp_path / "said.json"
    command = [interpreter("vllm"), script, model, folder, "8", out]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(list(map(str, command)), stdout=log, stderr=log, timeout=LIMIT, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    alone, adapted = json.loads(out.read_text())
    assert alone == pytest.approx(logprobs(model, {}), abs=1e-5)
    assert adapted == pytest.approx(logprobs(model, adapters), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(alone, adapted, strict=True)) > 0.1


def logprobs(folder: Path, adapters: dict[str, torch.Tensor]) -> list[float]:
    """Of `TEXT`, with B A added to the weights by hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")
    for name, a in adapters.items():
        if ".lora_A." in name:
            weight = name.replace(".lora_A.", ".")
            weights[weight] += LORA.alpha / len(a) * adapters[name.replace("lora_A", "lora_B")] @ a
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        said = model(torch.tensor([TEXT])).logits[0].log_softmax(-1)
    return [float(said[place, token]) for place, token in enumerate(TEXT[1:])]
