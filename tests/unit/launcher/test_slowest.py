"""Which learner rank is the slowest of a step, by the seconds of its passes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.controller.slowest import SlowestRank
from rl_megatron.observability.timeline.ranks import RankTimed

CALL: dict[str, str | int | float] = {"call": 1}


def workers(count: int) -> Any:
    return [SimpleNamespace(who=f"rank {n} (pid 7 on node{n})", pass_seconds=0.0, peak=n) for n in range(count)]


def row(ranks: Sequence[Any], slowest: SlowestRank, *seconds: float) -> dict[str, float]:
    for rank, each in zip(ranks, seconds, strict=True):
        rank.pass_seconds = each
    return slowest.row()


def test_it_is_logged_with_its_node_once_and_where_it_is_far_from_the_median(caplog: pytest.LogCaptureFixture) -> None:
    ranks = workers(3)
    slowest = SlowestRank(ranks)
    with caplog.at_level(logging.WARNING):
        assert row(ranks, slowest, 1.0, 1.4, 1.0) == {"ranks/slowest": 1, "memory/peak": 2}
        assert not caplog.messages
        for _ in range(3):
            assert row(ranks, slowest, 1.0, 1.1, 3.0)["ranks/slowest"] == 2
        assert caplog.messages == ["rank 2 (pid 7 on node2) took 3.0 s for its passes, the median rank 1.1 s"]
    assert [rank.pass_seconds for rank in ranks] == [0.0] * 3


def test_one_rank_and_steps_without_passes_have_no_row() -> None:
    alone, ranks = workers(1), workers(2)
    assert row(alone, SlowestRank(alone), 1.0) == {}
    assert row(ranks, SlowestRank(ranks), 1.0, 0.0) == {}


def test_seconds_of_a_call_are_those_in_which_it_ran() -> None:
    spans = [
        ("calls", "step", 0, 9, CALL),
        ("calls", "forward", 12, 14, None),
        ("calls", "score", 10**9, 3 * 10**9, CALL),
        ("other", "score", 0, 10**9, None),
    ]
    assert RankTimed(arrived=0, answered=4 * 10**9, spans=spans, lost=0).seconds_of("score") == 2.0
