"""Models that engines' CPU builds do not run: their own loaders take what a conversion wrote, each number once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_megatron.errors import CorruptionError
from rl_megatron.features.quantize.encoding import BLOCKS
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.formats.hf_folder import is_draft
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.routes.mirror import dtypes, shapes
from tests.draft_models import save_with_drafts, save_with_qwens_draft
from tests.engines.benches import REPO, interpreter, logprobs_of, request, served
from tests.engines.conftest import needs
from tests.engines.straight import FolderSender, direct
from tests.family_models import save_model

pytestmark = pytest.mark.slow
_LATENT = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_HUNYUANS = {"route_norm": True, "qk_norm": True}
PUBLISHED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "deepseek_v32": (_LATENT, {}),
    "glm_moe_dsa": ({**_LATENT, "index_topk_pattern": "FSFS"}, {}),
    "kimi_k25": (
        {**_LATENT, "architectures": ["DeepseekV3ForCausalLM"]},
        {"architectures": ["KimiK25ForConditionalGeneration"]},
    ),
    "hy_v3": ({"num_nextn_predict_layers": 1, "expert_hidden_dim": 24, "first_k_dense_replace": 1, **_HUNYUANS}, {}),
    "qwen3_next": ({"mtp_num_hidden_layers": 1, "full_attention_interval": 4}, {}),
    "qwen3_5_moe_stacked": ({"mtp_num_hidden_layers": 1, "full_attention_interval": 2}, {}),
}
"""What engines read of a published config.json and transformers does not write: keys of the text model, and others."""
WITHOUT_IMAGES = REPO / "tests" / "engines" / "without_images"
NOT_PUBLISHED = ("layer_types", "mlp_layer_types")  # which transformers writes since 5.19, and SGLang's refuses
LOADED = {"vllm": (*PUBLISHED,), "sglang": tuple(name for name in PUBLISHED if not name.startswith("qwen3_5"))}
"""SGLang's module of Qwen3.5 imports a kernel that its CPU build lacks."""
OF_BOTH = {"vllm": ("embed_tokens.weight", "lm_head.weight"), "sglang": ()}  # what is read for a draft layer, too
SAVES = {"mtp_num_hidden_layers": save_with_qwens_draft, "num_nextn_predict_layers": save_with_drafts}
HALF = {"vllm": None, "sglang": "indexer.weights_proj.weight"}  # what an engine holds in bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each model a folder of its own numbers, and what conversions wrote of others, in NAME-ours."""
    folder = tmp_path_factory.mktemp("published")
    for name, (of_text, above) in PUBLISHED.items():
        first, second = folder / name, folder / f"{name}-second"
        for each in (first, second):
            save = next((save for key, save in SAVES.items() if key in of_text), save_model)
            save(name, each, vocab_size=64)  # so many that vLLM pads nothing
        held = {key: tensor + 0.125 for key, tensor in load_file(second / "model.safetensors").items()}
        save_file(held, second / "model.safetensors", {"format": "pt"})
        convert.hf_to_megatron(second, folder / f"{name}-megatron")
        convert.megatron_to_hf(folder / f"{name}-megatron", folder / f"{name}-ours")
        given = json.loads((first / "config.json").read_text()) | above
        text = given.get("text_config", given)
        text |= of_text
        for key in NOT_PUBLISHED:
            text.pop(key, None)
        (first / "config.json").write_text(json.dumps(given))
    return folder


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_loaders_take_every_number_that_a_conversion_wrote(folders: Path, engine: str) -> None:
    """Into models that hold others. All by one program, which takes 10 to 20 seconds to begin."""
    needs(engine)
    pairs = [str(folders / f"{name}{end}") for name in LOADED[engine] for end in ("", "-ours")]
    done = subprocess.run(
        [interpreter(engine), REPO / "tests" / "engines" / f"{engine}_loads.py", *pairs],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": f"{WITHOUT_IMAGES}{os.pathsep}{REPO}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [list(one) for one in found] == [[str(folders / name)] for name in LOADED[engine]]
    for name, said in zip(LOADED[engine], found, strict=True):
        folder = folders / f"{name}-ours"
        ours, shape = load_file(folder / "model.safetensors"), read_shape(folder)
        of_draft = {key for key in ours if is_draft(key, shape)}
        with_draft = of_draft | {key for key in ours if key.endswith(OF_BOTH[engine])}
        wanted = [ours.keys() - of_draft, *([with_draft] if of_draft else [])]
        digests = [digest(engine, {key: ours[key] for key in names}) for names in wanted]
        assert said[str(folders / name)] == digests, name


def digest(engine: str, tensors: Mapping[str, Tensor]) -> str:
    """Of all numbers, in order of size, as the engine holds them."""
    held = [t.bfloat16() if (half := HALF[engine]) and key.endswith(half) else t for key, t in tensors.items()]
    numbers = torch.cat([tensor.float().flatten() for tensor in held]).sort().values
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()


# A vLLM with quantized weights: where its own loader puts them is known, so they arrive by the file and straight.
SIZES = {
    "vocab_size": 259,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 2048,
}


def model(folder: Path, seed: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3_moe", **SIZES, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_float8_weights_go_into_vllm_by_the_file_and_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs are those of what was pushed up to rounding, and checksums are of the quantized bytes. 40 seconds."""
    needs("vllm")
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests' / 'engines'}")
    folders = [model(tmp_path / str(seed), seed) for seed in (1, 2)]
    extension = "'--worker-extension-cls vllm_quantized.WorkerExtension'"
    with served(
        "vllm", folders[0], tmp_path, dtype="bfloat16", quantization="fp8", tolerance=0.25, options=extension
    ) as server:

        def samples_from(folder: Path, version: int) -> None:
            (completion,) = server.generate(request())[0]
            assert completion.spans == ((0, version),)
            expected = logprobs_of(folder, request().token_ids, completion, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=0.05, rtol=0)

        server.push(folders[0], 1)
        samples_from(folders[0], 1)
        (ranks,) = server.run(server.engine.weights.boxes(server.path)).values()
        known, held = shapes(server.path), dtypes(server.path)
        assert ranks == [{name: tuple((0, size) for size in shape) for name, shape in known.items()}]
        sender = FolderSender(folders[0], "fp8")
        with direct(server, sender):
            for version, folder in ((2, folders[1]), (3, folders[0])):
                sender.hold(folder, lambda tensors: None)
                server.sync.folder = folder
                update = server.run(server.weights.push(version))
                assert update.num_bytes == sum(prod(known[name]) * held[name].itemsize for name in known)
                samples_from(folder, version)
            assert update.quantization_error is not None
            assert 0.001 < update.quantization_error < 0.04
            sender.flipped = "model.layers.1.mlp.experts.3.up_proj.weight" + BLOCKS["fp8"].suffix
            with pytest.raises(CorruptionError, match=rf"wrote in {sender.flipped}$"):
                server.run(server.weights.push(4))
            sender.flipped = ""
            server.run(server.weights.push(5))
