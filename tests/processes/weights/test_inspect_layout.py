"""The inspection tool's text and picture match the layout."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from rl_megatron.weights.layouts.parsing import model_shape, parse_layout
from tools.inspect_layout import _layers

ROOT = Path(__file__).parents[3]
LAYOUT = "megatron,tp=2,pp=2,ep=4,dp=2"


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/inspect_layout.py", "qwen3-30b-a3b", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={"COLUMNS": "160"})


def test_every_rank_and_its_parameters_are_told() -> None:
    told = inspect(LAYOUT).stdout
    assert "24–47" in told
    assert "96–127" in told
    one = inspect(LAYOUT, "--rank", "5").stdout
    for name, shape in parse_layout("x", LAYOUT, model_shape("qwen3-30b-a3b")).local_shapes(5).items():
        if "experts" not in name:
            assert name in one
            assert " × ".join(map(str, shape)) in one


def test_the_picture_is_svg_with_a_box_for_what_each_rank_holds(tmp_path: Path) -> None:
    assert inspect(LAYOUT, "--svg", str(tmp_path / "layout.svg")).returncode == 0
    root = ET.parse(tmp_path / "layout.svg").getroot()  # our own file
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == 1 + 8 * 9 + 4 + 4 * 2  # the ground, the layers' rows, embedding, final norm and output layer


def test_a_layout_that_does_not_fit_is_refused() -> None:
    refused = inspect("megatron,pp=7")
    assert refused.returncode == 1
    assert "does not divide 48 layers" in refused.stderr


def test_a_stage_shows_its_layers_of_every_kind() -> None:
    """Qwen3-Next has attention in each fourth layer alone."""
    layout = parse_layout("x", "megatron,pp=24", model_shape("qwen3-next-80b-a3b"))
    assert [_layers(layout, stage) for stage in (0, 1, 23)] == ["0–1", "2–3", "46–47"]
