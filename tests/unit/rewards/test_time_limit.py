"""How long rewards compute, beside the event loop, by limits of their own calls; and what hostile ones do."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
import torch

from rl_megatron.config.sections.reward import HttpSection, RewardPart, RewardSection, SandboxSection
from rl_megatron.data.packing import Packer
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards import rules, threads
from rl_megatron.rewards.http import HttpReward
from rl_megatron.rewards.registry import WeightedSum, resolve_reward
from rl_megatron.rewards.scoring import CallLimit, distinct_errors, paused_while_queued, queued_slot, score
from rl_megatron.rewards.tests import PassedTests
from rl_megatron.rewards.threads import MAX_COMPUTING_THREADS, Plain, on_reward_loop, run_in_daemon_thread
from rl_megatron.sandbox.executors import Sandbox, _Slots
from rl_megatron.training.scores import RankedScores
from rl_megatron.types import Batch, Completion, ParallelDims, Prompt, RewardResult, Scores, Want
from tests.completions import completion
from tests.virtual_time import run_at_once

PROMPT = Prompt(id="p", text="", token_ids=(1,), answer="8", meta={"tests": [{"input": "", "output": "8"}]})
ASKED = PROMPT, [completion((1,))], ["print(8)  # $8$"]
EQUAL = dict.fromkeys(("one", "other", "hangs", "quick"), RewardPart())
LATE = "no answer within reward.timeout_seconds=10"


def taking(slots: asyncio.Semaphore, before: float, seconds: float) -> RewardFunction:
    """Computes for ``before`` seconds, waits for a slot, and holds it for ``seconds``."""

    async def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[RewardResult]:
        await asyncio.sleep(before)
        async with queued_slot(slots):
            await asyncio.sleep(seconds)
        return [RewardResult(total=1.0)]

    return reward


def errors(*functions: RewardFunction) -> list[str | None]:
    """What is wrong with the reward of each, asked at once with a limit of 10 s."""

    async def main() -> list[tuple[RewardResult, ...]]:
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
    assert errors(*[WeightedSum({"hangs": hangs, "quick": quick}, EQUAL)] * 5) == [LATE] * 5


def test_what_outlives_its_call_or_is_on_another_loop_changes_no_limit() -> None:
    slots, left = asyncio.Semaphore(1), list[asyncio.Task[list[RewardResult]]]()

    async def leaves(*asked: object) -> list[RewardResult]:
        left.append(asyncio.create_task(taking(slots, 0.0, 1.0)(*ASKED)))
        await asyncio.sleep(0)
        return [RewardResult(total=1.0)]

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
                with paused_while_queued():
                    return limit.runs

            assert await on_reward_loop(waits)

    asyncio.run(elsewhere())


def test_outside_of_a_call_nothing_is_counted() -> None:
    with paused_while_queued() as begun:
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
    before = [asyncio.create_task(run_in_daemon_thread(partial(over.wait, 60.0))) for _ in range(MAX_COMPUTING_THREADS)]
    await asyncio.sleep(0)  # they are started
    await waits_uncounted(Plain(lambda *asked: [1.0]), over.set)
    await asyncio.gather(*before)


async def _programs() -> None:
    sandbox = Sandbox(SandboxSection())
    sandbox._slots = _Slots(1)
    async with AsyncExitStack() as taken:
        await taken.enter_async_context(sandbox._slots.one(0))
        free, reward = taken.pop_all(), PassedTests(RewardSection().tests, sandbox)
        assert await waits_uncounted(reward, lambda: asyncio.ensure_future(free.aclose()))


async def _processes_of_math_verify() -> None:
    over = threading.Event()
    for _ in range(rules._PROCESSES):
        rules._threads.submit(over.wait, 60.0)
    assert await waits_uncounted(rules.math_verify, over.set)


async def _requests() -> None:
    async def answer(*asked: object, **limits: object) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        return 200, b'{"rewards": [1]}'

    reward = HttpReward("http://127.0.0.1:1/", HttpSection(), key="reward")
    reward._slots = asyncio.Semaphore(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_megatron.rewards.http.post_json", answer)
        await waits_uncounted(reward, reward._slots.release)


class _Ones:
    """A model on ranks: the value of each position is 1."""

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        return {"values": [[torch.ones(micro.input_ids.shape) for micro in row] for row in batch.micro_batches]}

    async def free_step(self) -> None:
        await asyncio.sleep(0)


async def _ranks() -> None:
    packer = Packer(dims=ParallelDims(), max_tokens=8, attention_cost=0.0)
    ranked = RankedScores(model=_Ones(), packer=packer, vocab_size=8)

    async def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[RewardResult]:
        return [RewardResult(total=score) for score in await ranked([[1, 2]])]

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


async def all_scored(function: RewardFunction, limit: float) -> tuple[Sequence[tuple[RewardResult, ...]], float, float]:
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
    assert found == [(RewardResult(total=1.0),)] * GROUPS
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
    assert found == [(RewardResult(total=1.0),)] * GROUPS
    assert most == threads.MAX_COMPUTING_THREADS


async def test_a_reward_that_never_returns_gives_up_its_place_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    over, calls = threading.Event(), iter(range(GROUPS))

    def stuck() -> float:
        if next(calls) < threads.MAX_COMPUTING_THREADS:
            over.wait()
        return 1.0

    monkeypatch.setattr(threads, "_COMPUTES", 0.0)  # as if it computed for ever
    try:
        function = named(monkeypatch, stuck)
        first = [score(function, ASKS, [DONE], [""], limit=1.0) for _ in range(threads.MAX_COMPUTING_THREADS)]
        rest = [score(function, ASKS, [DONE], [""], limit=60.0) for _ in range(GROUPS - len(first))]
        found = await asyncio.gather(*first, *rest)
    finally:
        over.set()
    errors = [one.error for (one,) in found]
    assert (
        errors[: threads.MAX_COMPUTING_THREADS]
        == ["no answer within reward.timeout_seconds=1"] * threads.MAX_COMPUTING_THREADS
    )
    assert errors[threads.MAX_COMPUTING_THREADS :] == [None] * (GROUPS - threads.MAX_COMPUTING_THREADS)


# Reward functions that return something other than numbers, raise exceptions that end a loop, or never return.
HOSTILE_PROMPT = Prompt(id="train:7", text="", token_ids=(1,), answer="")
WANTED = "; it must return a list with one number for each completion"
KINDS = ("plain", "later")  # a function, and an async one


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Slow:
    """A number that is long in coming."""

    def __init__(self) -> None:
        self.test_is_over = TESTS_OVER[-1]

    def __float__(self) -> float:
        self.test_is_over.wait()
        return 1.0


TESTS_OVER: list[threading.Event] = []  # one a test, the last is this one's


@pytest.fixture(autouse=True)
def end_of_a_test() -> Iterator[None]:
    """Whatever a test left waiting, also more than once, goes on behind it, and holds up no other."""
    TESTS_OVER.append(threading.Event())
    yield
    TESTS_OVER[-1].set()


def waits_twice() -> Iterator[bool]:
    over = TESTS_OVER[-1]
    return (over.wait() for _ in "ab")


def run(
    monkeypatch: pytest.MonkeyPatch, kind: str, does: Callable[[], object], *, limit: float = 30.0, count: int = 2
) -> tuple[RewardResult, ...]:
    module: Any = types.ModuleType("hostile_for_test")

    async def later(*_: object) -> object:
        await asyncio.sleep(0)
        return does()

    module.plain, module.later = (lambda *_: does()), later
    monkeypatch.setitem(sys.modules, "hostile_for_test", module)
    function = resolve_reward(f"hostile_for_test:{kind}")
    return asyncio.run(score(function, HOSTILE_PROMPT, [DONE] * count, [""] * count, limit=limit))


def raises(error: BaseException) -> Callable[[], object]:
    def does() -> object:
        raise error

    return does


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda: {0: 5.0, 1: 5.0}, f"returned a dict{WANTED}"),
        (lambda: {1.0, 2.0}, f"returned a set{WANTED}"),
        (lambda: "11", f"returned a str '11'{WANTED}"),
        (lambda: b"11", f"returned a bytes b'11'{WANTED}"),
        (lambda: None, f"returned None{WANTED}"),
        (lambda: 1.0, f"returned a float{WANTED}"),
        (lambda: ["1.0", "1.0"], f"returned a str '1.0' for completion 0{WANTED}"),
        (
            lambda: [1.0, [2.0]],
            "returned a list for completion 1; it must return a list with one number for each completion. Steps are "
            "read with reward.steps=true",
        ),
        (lambda: [1.0], "returned 1 rewards for 2 completions; it must return one for each"),
        (lambda: [1.0] * 9, "returned 9 rewards for 2 completions; it must return one for each"),
        (lambda: itertools.repeat(1.0), "returned more than 2 rewards for 2 completions; it must return one for each"),
        (lambda: [10**400, 1], "raised OverflowError: int too large to convert to float"),
        (raises(SystemExit(0)), "raised SystemExit: 0"),
        (raises(KeyboardInterrupt()), "raised KeyboardInterrupt: "),
        (raises(StopIteration()), "raised StopIteration: "),
        (raises(asyncio.CancelledError()), "raised CancelledError: "),
        (raises(TimeoutError("mine")), "raised TimeoutError: mine"),
        (raises(Untold()), "raised Untold: (an exception whose text cannot be had)"),
        (raises(ValueError("x" * 200_000)), f"raised ValueError: {'x' * 500}..."),
    ],
)
def test_what_is_no_reward_is_named_at_once_and_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, given: Callable[[], object], problem: str
) -> None:
    scored = run(monkeypatch, kind, given)
    if kind == "later" and problem.startswith("raised StopIteration"):
        problem = "raised RuntimeError: coroutine raised StopIteration"  # as Python has it
    assert ([one.error for one in scored], distinct_errors(scored)) == ([problem] * 2, [problem])
    assert all(math.isnan(one.total) for one in scored)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_kind_are_rewards(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import numpy as np
    import torch

    for given in ([True, 0], (x / 2 for x in (2, 0)), np.array([1, 0]), torch.tensor([1.0, 0.0]), range(1, -1, -1)):
        scored = run(monkeypatch, kind, lambda given=given: given)  # type: ignore[misc]
        assert scored == (RewardResult(total=1.0), RewardResult(total=0.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [lambda: TESTS_OVER[-1].wait(), lambda: [Slow(), Slow()], waits_twice])
def test_what_blocks_is_left_in_time(monkeypatch: pytest.MonkeyPatch, kind: str, given: Callable[[], object]) -> None:
    scored = run(monkeypatch, kind, given, limit=0.05)
    assert distinct_errors(scored) == ["no answer within reward.timeout_seconds=0.05"]
    assert all(one.late for one in scored)


def test_an_async_reward_that_will_not_be_cancelled_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("stubborn_for_test")
    asked, over = threading.Event(), TESTS_OVER[-1]

    async def stubborn(*_: object) -> list[float]:
        while not over.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                asked.set()
        return [1.0]

    module.stubborn = stubborn
    monkeypatch.setitem(sys.modules, "stubborn_for_test", module)
    scored = asyncio.run(score(resolve_reward("stubborn_for_test:stubborn"), HOSTILE_PROMPT, [DONE], [""], limit=1.0))
    assert distinct_errors(scored) == ["no answer within reward.timeout_seconds=1"]
    assert asked.wait(30)  # it was asked to end, for it had begun


def test_a_task_of_an_async_reward_that_exits_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("leaving_for_test")

    async def leave() -> None:
        sys.exit(0)

    async def reward(*_: object) -> list[float]:
        await asyncio.wait([asyncio.ensure_future(leave())])
        return [1.0]

    module.reward = reward
    monkeypatch.setitem(sys.modules, "leaving_for_test", module)
    for _ in range(2):
        function = resolve_reward("leaving_for_test:reward")
        assert asyncio.run(score(function, HOSTILE_PROMPT, [DONE], [""], limit=30.0)) == (RewardResult(total=1.0),)


def test_completions_without_a_number_are_named_three_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = run(monkeypatch, "plain", lambda: [math.nan] * 64, count=64)
    assert sum(one.error is not None for one in scored) == 64
    assert distinct_errors(scored)[2:] == ["completion 2 got nan, which is not finite", "so did 61 more"]
    scored = run(monkeypatch, "plain", lambda: [1e39, -1e30, 1.0], count=3)
    assert distinct_errors(scored) == ["completion 0 got 1e+39, which is beyond 1e+30"]
    assert [one.total for one in scored[1:]] == [-1e30, 1.0]
