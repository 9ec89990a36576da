"""A reward's time limit counts its own call, not what groups before it take of what they share.

These tests start processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from rl_megatron.rewards import threads
from tests.unit.rewards.test_time_limit import _processes_of_math_verify, _programs, _ranks, _requests, _threads, fenced


@pytest.mark.parametrize(
    "taken", [_threads, _processes_of_math_verify, _requests, _ranks, pytest.param(_programs, marks=fenced)]
)
def test_waits_for_what_groups_share_are_not_counted(
    taken: Callable[[], Coroutine[None, None, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_COMPUTES", 0.0)  # as if each thread computed
    asyncio.run(taken())
