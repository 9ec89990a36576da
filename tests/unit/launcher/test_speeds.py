"""Which ranks are named slow, from the seconds of their probes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from launcher.controller.speeds import Speeds, read_ranks, slowness
from rl_megatron.config.run import RunConfig, RunSection
from rl_megatron.observability import speed
from rl_megatron.observability.speed import Spent

FACTOR = 1.5


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize(
    ("bad", "steps", "expected"), [(20, 20, 1.8), (11, 20, 1.8), (10, 20, 1.0), (1, 20, 1.0), (1, 1, 1.8)]
)
def test_a_rank_is_as_slow_as_in_most_of_its_steps(ranks: int, bad: int, steps: int, expected: float) -> None:
    """Whatever the ranks share, as a clock that changes over time, cancels."""
    series = [
        [0.4 * (1 + step) * (1.8 if rank == 1 and step < bad else 1) for rank in range(ranks)] for step in range(steps)
    ]
    expected_of = [expected if rank == 1 else 1.0 for rank in range(ranks)]
    assert slowness(series) == pytest.approx(expected_of, rel=1e-12)


def test_half_of_the_ranks_may_be_slow() -> None:
    assert slowness([[1.0, 2.0, 2.0, 1.0]]) == [1, 2, 2, 1]


@pytest.mark.parametrize("ranks", [2, 16, 128])
def test_noise_and_hiccups_name_nobody_and_hide_nobody(ranks: int) -> None:
    """As on a busy machine: a tenth of the probes take five times as long, and all differ by 15 %."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = rng.lognormal(0, 0.15, (20, ranks)) * np.where(rng.random((20, ranks)) < 0.1, 5, 1)
        assert max(slowness(noise.tolist())) < FACTOR
        noise[:, 0] *= 2
        assert [rank for rank, times in enumerate(slowness(noise.tolist())) if times >= FACTOR] == [0]


@dataclass
class Process:
    node: str
    pid: int = 7


@dataclass
class Worker:
    rank: int
    process: Process
    spent: list[Spent] = field(default_factory=list)


@dataclass
class Group:
    workers: list[Worker]


class Rig:
    """Roles of ranks, two on a node, whose probes the test chooses."""

    def __init__(self, folder: Path, roles: dict[str, int], steps: int) -> None:
        self.named: list[list[str]] = []
        self.groups = {
            role: Group([Worker(rank, Process(f"{role}-node{rank // 2}")) for rank in range(count)])
            for role, count in roles.items()
        }
        config = RunConfig(run=RunSection(slow_factor=FACTOR, slow_steps=steps))
        self.speeds = Speeds(cast(Any, self.groups), config, folder, lambda nodes: self.named.append(list(nodes)))

    def step(self, **milliseconds: Sequence[float]) -> dict[str, float]:
        for role, times in milliseconds.items():
            for worker, each in zip(self.groups[role].workers, times, strict=True):
                worker.spent += [
                    Spent(passes=worker.rank, probing=2 * each / 1e3, probes=2, peak=9 * 10**9),
                    Spent(passes=1.0, probing=each / 1e3, probes=1, peak=8 * 10**9),
                ]
        return self.speeds.row()


def test_a_slow_rank_is_named_with_its_node_once_until_it_has_recovered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, {"learner": 6}, steps=2)
    slow, well = [1, 1, 1, 1.8, 3.6, 1.8], [1.0] * 6
    with caplog.at_level(logging.WARNING):
        row = rig.step(learner=slow)
        assert row.pop("ranks/slowness") == pytest.approx(3.6)
        assert row == {
            "seconds/passes_median": 3,
            "seconds/passes_max": 6,
            "memory/peak": 9 * 10**9,
            "ranks/slowest": 4,
        }
        assert not caplog.messages  # not yet
        for _ in range(5):
            rig.step(learner=slow)
        assert caplog.messages == [
            f"{who}: a fixed computation takes {times} times as long as on the median of 6 ranks, over the last 2 "
            f"steps, and other ranks wait for it; {tmp_path}/ranks.txt has the seconds of all ranks"
            for who, times in (("rank 4, 5 on learner-node2 is slow", 3.6), ("rank 3 on learner-node1 is slow", 1.8))
        ]
        assert rig.named == [["learner-node2", "learner-node1"]]
        caplog.clear()
        for times in ([1, 1, 1, 1, 3, 1], well):
            for _ in range(2):
                rig.step(learner=times)
        assert caplog.messages == [f"learner-node{n} is no longer slow" for n in (1, 2)]
        assert rig.named[1:] == [["learner-node2"], []]


def test_unequal_work_and_roles_of_unlike_nodes_name_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks differ in seconds of passes (`Rig.step`), and a reference may be on slower nodes altogether."""
    rig = Rig(tmp_path, {"learner": 4, "reference": 4}, steps=1)
    row = rig.step(learner=[1.0] * 4, reference=[3.0, 3.0, 2.4, 3.0])
    assert row["seconds/passes_max"] == 4 * row["seconds/passes_median"] / 2
    assert not caplog.messages
    assert rig.named == []
    lines = (tmp_path / "ranks.txt").read_text().splitlines()
    assert lines[5].split() == ["rank", "node", "pid", "times", "probe", "ms", "passes", "s", "memory", "GB"]
    assert lines[6].split() == ["rank", "0", "learner-node0", "7", "1.00", "1.000", "1.000", "9.00"]
    assert lines[-1].split() == ["reference", "rank", "2", "reference-node1", "7", "0.80", "2.400", "3.000", "9.00"]
    ranks = read_ranks(tmp_path / "ranks.txt")
    assert [(r.rank, r.node, r.pid, r.times) for r in ranks] == [(n, f"learner-node{n // 2}", 7, 1.0) for n in range(4)]


def test_a_step_without_probes_does_not_count(tmp_path: Path) -> None:
    rig = Rig(tmp_path, {"learner": 2}, steps=2)
    assert rig.step() == {}
    assert rig.step(learner=[1, 2])
    assert rig.step() == {}
    assert rig.named == []
    rig.step(learner=[1, 2])
    assert rig.named == [["learner-node0"]]


def test_a_rank_counts_passes_with_the_probes_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.taken() is None  # this process does not measure
    monkeypatch.setattr(speed, "_meter", None)
    speed.begin(torch.device("cpu"))
    assert speed.taken() is None
    with speed.timed():
        speed.probe()
        speed.probe()
    spent = speed.taken()
    assert spent is not None
    assert spent.probes == 2
    assert 0 < spent.probing < spent.passes
    assert speed.taken() is None
