"""How long rewards compute, beside the event loop: those that wait together, and limits of their own calls alone."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
import torch

from rl_megatron.config.sections.reward import HttpSection, RewardPart, RewardSection, SandboxSection
from rl_megatron.data.packing import Packer
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards import math_verify, threads
from rl_megatron.rewards.http import HttpReward
from rl_megatron.rewards.registry import WeightedSum, resolve_reward
from rl_megatron.rewards.scoring import CallLimit, queued, score, turn_of
from rl_megatron.rewards.tests import PassedTests
from rl_megatron.rewards.threads import MOST_COMPUTING, Plain, in_daemon_thread, on_loop_apart
from rl_megatron.sandbox.table import Sandbox, _Slots
from rl_megatron.training.scores.reward_models import RankedScores
from rl_megatron.types import Batch, Completion, ParallelDims, Prompt, Scored, Scores, Want
from tests.completions import completion
from tests.virtual_time import run_at_once

PROMPT = Prompt(id="p", text="", token_ids=(1,), answer="8", meta={"tests": [{"input": "", "output": "8"}]})
ASKED = PROMPT, [completion((1,))], ["print(8)  # $8$"]
EQUAL = dict.fromkeys(("one", "other", "hangs", "quick"), RewardPart())
LATE = "no answer within reward.timeout_seconds=10"


def taking(slots: asyncio.Semaphore, before: float, seconds: float) -> RewardFunction:
    """Computes for ``before`` seconds, waits for a slot, and holds it for ``seconds``."""

    async def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        await asyncio.sleep(before)
        async with turn_of(slots):
            await asyncio.sleep(seconds)
        return [Scored(total=1.0)]

    return reward


def errors(*functions: RewardFunction) -> list[str | None]:
    """What is wrong with the reward of each, asked at once with a limit of 10 s."""

    async def main() -> list[tuple[Scored, ...]]:
        return await asyncio.gather(*(score(one, *ASKED, limit=10.0) for one in functions))

    return [one.error for (one,) in run_at_once(main())]


def test_the_limit_stops_while_a_call_waits_and_goes_on_where_it_stopped() -> None:
    slots = asyncio.Semaphore(1)
    assert errors(*[taking(slots, 0.0, 9.0)] * 20) == [None] * 20
    slots = asyncio.Semaphore(1)
    assert errors(taking(slots, 0.0, 9.0), taking(slots, 2.0, 7.5), taking(slots, 2.0, 8.5)) == [None, None, LATE]
    slots = asyncio.Semaphore(1)
    assert errors(taking(slots, 0.0, 11.0), taking(slots, 0.0, 9.0)) == [LATE, None]


@pytest.mark.parametrize(("seconds", "error"), [(8.5, None), (9.5, LATE)])
def test_the_limit_of_a_sum_runs_while_a_part_does(seconds: float, error: str | None) -> None:
    one, other = asyncio.Semaphore(1), asyncio.Semaphore(1)
    both = WeightedSum({"one": taking(one, 0.0, 1.0), "other": taking(other, 0.0, seconds)}, EQUAL)
    assert errors(taking(one, 0.0, 5.0), taking(other, 0.0, 9.5), both) == [None, None, error]


def test_parts_that_hold_what_other_parts_wait_for_end_with_their_call() -> None:
    slots = asyncio.Semaphore(2)
    hangs, quick = taking(slots, 0.0, 1e9), taking(slots, 0.1, 0.0)
    each = WeightedSum({"hangs": hangs, "quick": quick}, EQUAL)
    assert errors(*[each] * 5) == [LATE] * 5


def test_what_outlives_its_call_or_is_on_another_loop_changes_no_limit() -> None:
    slots, left = asyncio.Semaphore(1), list[asyncio.Task[list[Scored]]]()

    async def leaves(*asked: object) -> list[Scored]:
        left.append(asyncio.create_task(taking(slots, 0.0, 1.0)(*ASKED)))
        await asyncio.sleep(0)
        return [Scored(total=1.0)]

    async def main() -> int:
        await slots.acquire()
        await score(leaves, *ASKED, limit=10.0)
        slots.release()
        await left[0]
        return slots._value

    assert run_at_once(main()) == 1

    async def elsewhere() -> None:
        async with CallLimit(60.0) as limit:

            async def waits() -> bool:
                with queued():
                    return limit.runs

            assert await on_loop_apart(waits)

    asyncio.run(elsewhere())


def test_outside_of_a_call_nothing_is_counted() -> None:
    with queued() as begun:
        begun()


async def waits_uncounted(function: RewardFunction, free: Callable[[], object]) -> bool:
    """What ``function`` shares is taken up to ``free``: its call waits without its limit. Whether it then ran in it."""
    async with CallLimit(60.0) as limit, asyncio.timeout(60.0):
        call = asyncio.create_task(function(*ASKED))  # type: ignore[arg-type]
        while limit.runs and not call.done():
            await asyncio.sleep(0)
        assert not call.done()
        free()
        while not limit.runs:
            await asyncio.sleep(0)
        ran = not call.done()
        assert [one.total for one in await call] == [1.0]
    return ran


async def _threads() -> None:
    over = threading.Event()
    before = [asyncio.create_task(in_daemon_thread(partial(over.wait, 60.0))) for _ in range(MOST_COMPUTING)]
    await asyncio.sleep(0)  # they are started
    await waits_uncounted(Plain(lambda *asked: [1.0]), over.set)
    await asyncio.gather(*before)


async def _programs() -> None:
    sandbox = Sandbox(SandboxSection())
    sandbox._slots = _Slots(1)
    async with AsyncExitStack() as taken:
        await taken.enter_async_context(sandbox._slots.one(0))
        free = taken.pop_all()
        reward = PassedTests(RewardSection().tests, sandbox)
        assert await waits_uncounted(reward, lambda: asyncio.ensure_future(free.aclose()))


async def _processes_of_math_verify() -> None:
    over = threading.Event()
    for _ in range(math_verify._PROCESSES):
        math_verify._threads.submit(over.wait, 60.0)
    assert await waits_uncounted(math_verify.math_verify, over.set)


async def _requests() -> None:
    async def answer(*asked: object, **limits: object) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        return 200, b'{"rewards": [1]}'

    reward = HttpReward("http://127.0.0.1:1/", HttpSection(concurrency=1), key="reward")
    await reward._slots.acquire()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_megatron.rewards.http.post_json", answer)
        await waits_uncounted(reward, reward._slots.release)


class _Ones:
    """A model on ranks: the value of each position is 1."""

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        return {"values": [[torch.ones(micro.input_ids.shape) for micro in row] for row in batch.micro_batches]}

    async def forget(self) -> None:
        await asyncio.sleep(0)


async def _ranks() -> None:
    packer = Packer(dims=ParallelDims(), max_tokens=8, attention_cost=0.0)
    ranked = RankedScores(model=_Ones(), packer=packer, vocab_size=8)

    async def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        return [Scored(total=score) for score in await ranked([[1, 2]])]

    await ranked.turn.acquire()
    assert await waits_uncounted(reward, ranked.turn.release)


# Plain rewards run beside the event loop: those that wait together, those that compute in turns.

ASKS = Prompt(id="train:7", text="", token_ids=(1,), answer="")
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
    scoring = asyncio.gather(*(score(function, ASKS, [DONE], [""], limit=limit) for _ in range(GROUPS)))
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
        first = [score(function, ASKS, [DONE], [""], limit=1.0) for _ in range(threads.MOST_COMPUTING)]
        rest = [score(function, ASKS, [DONE], [""], limit=60.0) for _ in range(GROUPS - len(first))]
        found = await asyncio.gather(*first, *rest)
    finally:
        over.set()
    errors = [one.error for (one,) in found]
    assert errors[: threads.MOST_COMPUTING] == ["no answer within reward.timeout_seconds=1"] * threads.MOST_COMPUTING
    assert errors[threads.MOST_COMPUTING :] == [None] * (GROUPS - threads.MOST_COMPUTING)
