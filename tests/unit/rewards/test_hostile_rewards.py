"""Reward functions that return something other than numbers, raise exceptions that end a loop, or never return."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.rewards.scoring import errors_of, score
from rl_megatron.types import Prompt, Scored
from tests.completions import completion

PROMPT = Prompt(id="train:7", text="", token_ids=(1,), answer="")
DONE = completion((1,))
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
) -> tuple[Scored, ...]:
    module: Any = types.ModuleType("hostile_for_test")

    async def later(*_: object) -> object:
        await asyncio.sleep(0)
        return does()

    module.plain, module.later = (lambda *_: does()), later
    monkeypatch.setitem(sys.modules, "hostile_for_test", module)
    function = resolve_reward(f"hostile_for_test:{kind}")
    return asyncio.run(score(function, PROMPT, [DONE] * count, [""] * count, limit=limit))


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
        (lambda: [1.0, None], f"returned None for completion 1{WANTED}"),
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
    assert ([one.error for one in scored], errors_of(scored)) == ([problem] * 2, [problem])
    assert all(math.isnan(one.total) for one in scored)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_kind_are_rewards(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import numpy as np
    import torch

    for given in ([True, 0], (x / 2 for x in (2, 0)), np.array([1, 0]), torch.tensor([1.0, 0.0]), range(1, -1, -1)):
        scored = run(monkeypatch, kind, lambda given=given: given)  # type: ignore[misc]
        assert scored == (Scored(total=1.0), Scored(total=0.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [lambda: TESTS_OVER[-1].wait(), lambda: [Slow(), Slow()], waits_twice])
def test_blocking_calls_are_left_in_time(
    monkeypatch: pytest.MonkeyPatch, kind: str, given: Callable[[], object]
) -> None:
    scored = run(monkeypatch, kind, given, limit=0.05)
    assert errors_of(scored) == ["no answer within reward.timeout_seconds=0.05"]
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
    function = resolve_reward("stubborn_for_test:stubborn")
    scored = asyncio.run(score(function, PROMPT, [DONE], [""], limit=1.0))
    assert errors_of(scored) == ["no answer within reward.timeout_seconds=1"]
    assert asked.wait(30)  # it was asked to end, for it had begun


def test_a_task_of_an_async_reward_that_exits_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("leaving_for_test")

    async def leave() -> None:
        sys.exit(0)

    async def reward(*_: object) -> list[float]:
        task = asyncio.ensure_future(leave())
        await asyncio.wait([task])
        return [1.0]

    module.reward = reward
    monkeypatch.setitem(sys.modules, "leaving_for_test", module)
    for _ in range(2):
        function = resolve_reward("leaving_for_test:reward")
        assert asyncio.run(score(function, PROMPT, [DONE], [""], limit=30.0)) == (Scored(total=1.0),)


def test_completions_without_a_number_are_named_three_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = run(monkeypatch, "plain", lambda: [math.nan] * 64, count=64)
    assert sum(one.error is not None for one in scored) == 64
    assert errors_of(scored)[2:] == ["completion 2 got nan, which is not finite", "so did 61 more"]


def test_a_reward_that_float32_has_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = run(monkeypatch, "plain", lambda: [1e39, -1e30, 1.0], count=3)
    assert errors_of(scored) == ["completion 0 got 1e+39, which is beyond 1e+30"]
    assert [one.total for one in scored[1:]] == [-1e30, 1.0]
