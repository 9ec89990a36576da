"""The tables of docs/algorithms.md are the rows a reader copies: each must build, and name only keys that exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml

from rl_megatron.algorithms.advantages import group_advantages
from rl_megatron.algorithms.corrections import Correction
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.config import AlgorithmSection

ROOT = Path(__file__).parents[3]
ADVANTAGE_KEYS = {"advantage_mean", "advantage_std", "leave_one_out"}


def documented_rows() -> dict[str, dict[str, object]]:
    rows = {}
    for line in (ROOT / "docs" / "algorithms.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 6 and "=" in cells[4]:
            pairs = re.fullmatch(r"`(.*)`", cells[4])
            assert pairs, line
            rows[cells[0]] = {k: yaml.safe_load(_number(v)) for k, v in (p.split("=") for p in pairs[1].split())}
    return rows


def _number(text: str) -> str:
    """YAML 1.1 reads 3e-4 as a string."""
    return str(float(text)) if re.fullmatch(r"[0-9.]+e-?[0-9]+", text) else text


def loss_of(row: dict[str, object]) -> PolicyLoss:
    """Raises TypeError for a key that no choice has."""
    correction = {k.removeprefix("correction."): v for k, v in row.items() if k.startswith("correction.")}
    own = {k: v for k, v in row.items() if k not in ADVANTAGE_KEYS and not k.startswith("correction.")}
    return PolicyLoss(**own, correction=Correction(**correction) if correction else None)


@pytest.mark.parametrize("name", list(documented_rows()))
def test_every_documented_row_builds(name: str) -> None:
    row = documented_rows()[name]
    loss = loss_of(row)
    fields = {f.name: getattr(loss, f.name) for f in dataclasses.fields(loss)}
    for key, value in row.items():
        if key in fields:
            assert fields[key] == value
    out = group_advantages(
        torch.tensor([0.0, 1.0]),
        torch.zeros(2, dtype=torch.int64),
        mean=row.get("advantage_mean", "group"),
        std=row.get("advantage_std", "group"),
        leave_one_out=row.get("leave_one_out", False),
    )
    assert (out[0] < out[1]).item()


def test_the_limits_of_the_papers_are_in_the_rows() -> None:
    """A token ratio's 0.2 in a GSPO recipe is a thousand times too wide."""
    rows = documented_rows()
    assert (rows["gspo"]["clip_low"], rows["gspo"]["clip_high"]) == (3e-4, 4e-4)
    assert rows["dapo"]["clip_high"] == 0.28
    assert len(rows) == 21


@pytest.mark.parametrize("name", ["gspo", "cispo", "grpo"])
def test_the_shipped_configuration_is_the_documented_row(name: str) -> None:
    text = (ROOT / "conf" / "algorithm" / f"{name}.yaml").read_text()
    section = AlgorithmSection.model_validate(yaml.safe_load(text))
    loss = loss_of(documented_rows()[name])
    shared = [f.name for f in dataclasses.fields(loss) if f.name in AlgorithmSection.model_fields]
    assert {"ratio_level", "objective", "aggregation", "clip_low", "cap_high"} <= set(shared)
    assert {key: getattr(section, key) for key in shared} == {key: getattr(loss, key) for key in shared}
