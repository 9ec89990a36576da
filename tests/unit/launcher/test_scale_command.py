"""``rl-megatron scale`` as a user calls it: terms, reasons, JSON, and a configuration that ``submit`` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.launcher.commands import Said

REPO = Path(__file__).resolve().parents[3]
ASKED = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=64")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("COLUMNS", "160")
    return Said("scale", capsys)


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
