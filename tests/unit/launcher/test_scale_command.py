"""``rl-megatron scale`` as a user calls it: terms, reasons, JSON, and a configuration that ``submit`` takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_megatron.config.io import load_config
from tests.unit.launcher.commands import Said
from tests.unit.launcher.sites import site
from tests.unit.launcher.test_memory import QWEN3

REPO = Path(__file__).resolve().parents[3]
ASKED = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=64")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("COLUMNS", "160")
    return Said("scale", capsys)


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


def test_the_best_layout_comes_with_terms_and_the_others_with_reasons(said: Said) -> None:
    text = said("deepseek-v3", "gpus=512", "gpu=h100", "--explain", "all-to-all")
    for words in (
        "seconds of a step",
        "training, by term",
        "GB on the fullest GPU",
        "experts",
        "optimizer",
        "rejected: ",
    ):
        assert words in text
    assert "tokens/s, " in text
    assert "all-to-all: tokens to the ranks of their experts and back" in text
    assert "--explain speed: no such term; terms: linears" in said(*ASKED, "--explain", "speed", status=1)


def test_json_has_every_term_and_they_add_up(said: Said) -> None:
    tree = json.loads(said(*ASKED, "--json"))
    best = tree["plans"][0]
    assert sum(best["training"].values()) == pytest.approx(best["parts"]["training"])
    assert sum(best["bytes"].values()) <= 80e9
    assert best["seconds"] == min(plan["seconds"] for plan in tree["plans"])
    assert all(one["reason"] for one in tree["rejected"])
