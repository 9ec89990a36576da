"""``rl-megatron scale`` as a user calls it: terms, reasons, JSON, and a configuration that ``submit`` takes.

These tests start processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rl_megatron.config.io import load_config
from tests.unit.launcher.sites import site
from tests.unit.launcher.test_memory import QWEN3
from tests.unit.launcher.test_scale_command import ASKED, REPO


def test_a_written_layout_is_a_configuration_that_submit_takes_without_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from launcher.__main__ import main; main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    written = tmp_path / "mine.yaml"
    commands = (
        ["scale", *ASKED, "--write", str(written)],
        ["submit", str(written), *site(tmp_path, QWEN3), "run.name=here", "--dry-run"],
    )
    texts = []
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", code, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert "on 16 h100, goal=tokens" in texts[0]
    assert "nothing was sent; this sends it" in texts[1]
    config = load_config(str(tmp_path / "runs" / "here" / "config.yaml"), [])
    assert config.learner.dims.world_size + config.slurm.engines.nodes * 8 == 16
    assert f"learner.ep={config.learner.ep}" in texts[0] or config.learner.ep == 1
    recipe = load_config("qwen3_30b_a3b", ["model.path=/models/given"])
    assert config.learner.optimizer == recipe.learner.optimizer
    assert config.train.model_copy(update={"max_staleness": 0}) == recipe.train
