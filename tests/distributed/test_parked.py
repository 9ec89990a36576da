"""A learner that leaves its GPUs while servers sample, on pretended GPUs: the same numbers, and the planned bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed import parked
from tests.distributed.pretended.ranks import World, run_worlds
from tools.planner import host_memory
from tools.planner.host_memory import host_bytes, pinned
from tools.planner.memory import footprints

HELD = ("parameters", "gradients", "optimizer", "critic", "reference")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parked")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return make_tiny_model(parked.TINY, root, seed=3)


@pytest.fixture(scope="module")
def seen(root: Path, model: Path) -> dict[str, list[dict[str, Any]]]:
    """By run, what each rank saw, by version of the weights."""
    for name in parked.RUNS:
        (root / name).mkdir()
    run_worlds([World(main=parked.rank_main, size=parked.SIZE, arguments=(n, (), root, model)) for n in parked.RUNS])
    paths = {name: [root / name / f"rank{rank}.json" for rank in range(parked.SIZE)] for name in parked.RUNS}
    return {name: [json.loads(path.read_text()) for path in files] for name, files in paths.items()}


@pytest.mark.parametrize("name", ["optimizer", "resumed"])
def test_every_number_and_every_pushed_tensor_is_the_same_to_the_bit(name: str, seen: Any) -> None:
    for found, wanted in zip(seen[name], seen["all stays"], strict=True):
        for version, said in found.items():
            for what in ("pushed", "reference", "values", "policy", "critic"):
                assert said[what] == wanted[version][what], (version, what)
    steps = [said["policy"] for said in seen["all stays"][0].values()]
    assert len({loss for loss, _ in steps}) == parked.STEPS  # it learns


MOMENTS = ("sampling", "saved", "interrupted")
REST = 0.04  # of all: rotary angles, what observers count, and tensors smaller than a GPU's allocator gives


def test_while_servers_sample_gpus_hold_what_is_planned(seen: Any, root: Path, model: Path) -> None:
    shape, second = read_shape(model), str(parked.SAVED)
    for name, level in parked.RUNS.items():
        planned = {f.phase: f.terms for f in footprints(parked.config_of(level, root), shape)}
        stays, everything = (sum(planned[phase][term] for term in HELD) for phase in ("sampling", "training"))
        left = everything - stays
        for rank, before in zip(seen[name], seen["all stays"], strict=True):
            assert before[second]["sampling"] - rank[second]["sampling"] == pytest.approx(left, rel=0.03), name
            assert rank[second]["training"] == before[second]["training"]  # all is back
            after = [said[moment] for said in rank.values() for moment in MOMENTS if moment in said]
            assert max(after) < stays + REST * everything, name
            assert max(after[1:]) - min(after[1:]) < 256, name  # after the first step


def test_the_host_holds_all_but_gradients(seen: Any, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB", parked.SLAB)
    shape = read_shape(model)
    configs = {level: parked.config_of(level, root) for level in parked.RUNS.values()}
    held = {level: host_bytes(config, shape) for level, config in configs.items()}
    assert held[None] == held["gradients"] == 0
    asked = [rank[str(parked.SAVED)]["pinned"] for rank in seen["optimizer"]]
    assert {max(sizes) for sizes in asked} == {parked.SLAB}
    found = sum(pinned(size) for sizes in asked for size in sizes)
    assert found == pytest.approx(held["optimizer"], rel=0.05)  # what is smaller than a GPU's allocator gives stays
