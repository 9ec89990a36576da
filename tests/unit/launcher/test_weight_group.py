"""Two phases of a push over ranks whose answers are given."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from launcher.controller.group import WorkerGroup
from launcher.controller.roles import WeightGroup
from rl_megatron.errors import CorruptionError
from rl_megatron.types import WeightUpdate


class TwoRanks:
    """Rank 1 stages corrupted weights so many times."""

    def __init__(self, corrupted: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self._corrupted = corrupted

    async def each(self, name: str, version: int) -> list[Any]:
        self.calls.append((name, version))
        if name == "commit":
            return [None, None]
        good = [
            WeightUpdate(version=version, num_bytes=b, seconds=s, verify_seconds=s / 4) for b, s in ((3, 2.0), (4, 1.0))
        ]
        self._corrupted -= 1
        return [good[0], CorruptionError("layer 3 on rank 1")] if self._corrupted >= 0 else good


def push(ranks: TwoRanks) -> WeightUpdate:
    return asyncio.run(WeightGroup(cast(WorkerGroup, ranks)).push(5))


def test_every_rank_stages_before_any_commits() -> None:
    ranks = TwoRanks(corrupted=0)
    assert push(ranks) == WeightUpdate(version=5, num_bytes=7, seconds=2.0, verify_seconds=0.5)
    assert ranks.calls == [("stage", 5), ("commit", 5)]


def test_corrupted_weights_are_moved_again_once() -> None:
    ranks = TwoRanks(corrupted=1)
    assert push(ranks).num_bytes == 3 + 3 + 4
    assert ranks.calls == [("stage", 5), ("stage", 5), ("commit", 5)]


def test_weights_corrupted_twice_are_never_committed() -> None:
    ranks = TwoRanks(corrupted=2)
    with pytest.raises(CorruptionError, match="layer 3 on rank 1"):
        push(ranks)
    assert ranks.calls == [("stage", 5), ("stage", 5)]
