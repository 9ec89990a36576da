"""A vLLM with quantised weights: where its own loader puts them is known, so they arrive by the file and straight."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.formats.scaled import BLOCKS
from rl_megatron.weights.routes.mirror import dtypes, shapes
from tests.engines.benches import REPO, logprobs_of, request, served
from tests.engines.conftest import needs
from tests.engines.straight import FolderSender, direct

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
    """Log-probs are those of what was pushed up to rounding, and checksums are of the quantised bytes. 40 seconds."""
    needs("vllm")
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests' / 'engines'}")
    folders = [model(tmp_path / str(seed), seed) for seed in (1, 2)]
    extension = "'--worker-extension-cls vllm_quantised.WorkerExtension'"
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
