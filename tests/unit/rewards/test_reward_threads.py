"""Plain rewards run beside the event loop: those that wait together, those that compute in turns."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards import threads
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.rewards.scoring import score
from rl_megatron.types import Prompt, Scored
from tests.completions import completion

PROMPT = Prompt(id="train:7", text="", token_ids=(1,), answer="")
DONE = completion((1,))
GROUPS = 48


def named(monkeypatch: pytest.MonkeyPatch, function: Callable[[], float]) -> RewardFunction:
    """The user's plain function, as ``reward.function`` names it."""
    module: Any = types.ModuleType("rewards_for_test")
    module.plain = lambda prompt, completions, texts: [function()] * len(completions)
    monkeypatch.setitem(sys.modules, "rewards_for_test", module)
    return resolve_reward("rewards_for_test:plain")


async def all_scored(function: RewardFunction, limit: float) -> tuple[Sequence[tuple[Scored, ...]], float, float]:
    """The scores of all groups at once, their seconds, and the longest that a heartbeat of the loop was late."""
    late, began = 0.0, time.monotonic()
    scoring = asyncio.gather(*(score(function, PROMPT, [DONE], [""], limit=limit) for _ in range(GROUPS)))
    while not scoring.done():
        asleep = time.monotonic()
        await asyncio.sleep(0.01)
        late = max(late, time.monotonic() - asleep - 0.01)
    return await scoring, time.monotonic() - began, late


def test_rewards_that_wait_wait_together_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits() -> float:
        time.sleep(0.5)
        return 1.0

    found, seconds, late = asyncio.run(all_scored(named(monkeypatch, waits), 60.0))
    assert found == [(Scored(total=1.0),)] * GROUPS
    assert seconds < GROUPS * 0.5 / 4
    assert late < 0.5  # a heartbeat does not wait for one of them


def test_rewards_that_compute_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def computes() -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        with lock:
            running -= 1
        return 1.0

    monkeypatch.setattr(threads, "_COMPUTES", 0.0)  # whatever else this machine computes
    found, _, _ = asyncio.run(all_scored(named(monkeypatch, computes), 60.0))
    assert found == [(Scored(total=1.0),)] * GROUPS
    assert most == threads.MOST_COMPUTING


async def test_a_reward_that_never_returns_gives_up_its_place_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    over, calls = threading.Event(), iter(range(GROUPS))

    def stuck() -> float:
        if next(calls) < threads.MOST_COMPUTING:
            over.wait()
        return 1.0

    monkeypatch.setattr(threads, "_COMPUTES", 0.0)  # as if it computed for ever
    try:
        function = named(monkeypatch, stuck)
        first = [score(function, PROMPT, [DONE], [""], limit=1.0) for _ in range(threads.MOST_COMPUTING)]
        rest = [score(function, PROMPT, [DONE], [""], limit=60.0) for _ in range(GROUPS - len(first))]
        found = await asyncio.gather(*first, *rest)
    finally:
        over.set()
    errors = [one.error for (one,) in found]
    assert errors[: threads.MOST_COMPUTING] == ["no answer within reward.timeout_seconds=1"] * threads.MOST_COMPUTING
    assert errors[threads.MOST_COMPUTING :] == [None] * (GROUPS - threads.MOST_COMPUTING)
