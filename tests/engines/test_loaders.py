"""Models that vLLM's CPU build does not run: its own loaders take what a conversion wrote, each number once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.weights.checkpoints import convert
from tests.engines.benches import REPO, interpreter
from tests.engines.conftest import needs
from tests.family_models import save_model

pytestmark = pytest.mark.slow
_LATENT = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
PUBLISHED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "deepseek_v32": (_LATENT, {}),
    "glm_moe_dsa": ({**_LATENT, "index_topk_pattern": "FSFS"}, {}),
    "kimi_k25": (_LATENT, {"architectures": ["KimiK25ForConditionalGeneration"]}),
}
"""What vLLM reads of the published config.json and transformers does not write: keys of the text model, and others."""


def test_vllms_loaders_take_every_number_that_a_conversion_wrote(tmp_path: Path) -> None:
    """Into models that hold others. All in one process, which takes 20 seconds to begin."""
    needs("vllm")
    for name, (of_text, above) in PUBLISHED.items():
        first, second = tmp_path / name, tmp_path / f"{name}-second"
        for folder in (first, second):
            save_model(name, folder, vocab_size=64)  # so many that vLLM pads nothing
        held = {key: tensor + 0.125 for key, tensor in load_file(second / "model.safetensors").items()}
        save_file(held, second / "model.safetensors", {"format": "pt"})
        convert.hf_to_megatron(second, tmp_path / f"{name}-megatron")
        convert.megatron_to_hf(tmp_path / f"{name}-megatron", tmp_path / f"{name}-ours")
        given = json.loads((first / "config.json").read_text()) | above
        given.get("text_config", given).update(of_text)
        (first / "config.json").write_text(json.dumps(given))
    folders = [str(tmp_path / f"{name}{end}") for name in PUBLISHED for end in ("", "-ours")]
    done = subprocess.run(
        [interpreter("vllm"), REPO / "tests" / "engines" / "vllm_loads.py", *folders],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [list(one) for one in found] == [[str(tmp_path / name)] for name in PUBLISHED]
    for name, said in zip(PUBLISHED, found, strict=True):
        ours = load_file(tmp_path / f"{name}-ours" / "model.safetensors")
        numbers = torch.cat([tensor.float().flatten() for tensor in ours.values()]).sort().values
        assert said[str(tmp_path / name)] == hashlib.sha256(numbers.numpy().tobytes()).hexdigest(), name
