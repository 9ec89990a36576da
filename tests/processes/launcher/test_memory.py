"""What GPUs must hold, and the recipes that are made to fit: published sizes, closed forms, one refusal a term.

These tests start processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.preflight.checks import preflight
from launcher.programs.submit import checked
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from tests.unit.launcher.test_memory import folder_of


def test_a_recipe_wants_its_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path is not given, .* model\.name=qwen3-30b-a3b; set model\.path"):
        load_config("qwen3_30b_a3b", [])
    fits = checked(load_config("qwen3_30b_a3b", [f"model.path={folder_of(tmp_path)}"]))
    assert "memory: up to 113.3 GB a GPU (rank 0), most of it: optimizer" in fits.describe()
    other = load_config("qwen3_30b_a3b", [f"model.path={folder_of(tmp_path, num_hidden_layers=94)}"])
    with pytest.raises(ConfigError, match="num_layers 94 instead of 48"):
        preflight(other).raise_problems()
    with pytest.raises(ConfigError, match=r"model\.name=qwen4: not a known model; known: qwen3-30b-a3b"):
        preflight(load_config("qwen3_30b_a3b", [f"model.path={tmp_path}", "model.name=qwen4"])).raise_problems()
