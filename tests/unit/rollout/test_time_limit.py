"""Completions that run longer than ``rollout.max_seconds`` end where they are, and count as truncated."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import ConfigError
from rl_megatron.training.group_job import late_row
from rl_megatron.types import Completion, FinishReason, Prompt
from tests.completions import completion, plain
from tests.unit.rollout.test_engine_servers import PARAMS, REQUEST, Answer, engine_of, push, running

LIMIT = 300.0
LONG = replace(REQUEST, params=replace(PARAMS, max_new_tokens=5, stop_token_ids=(9,)), max_seconds=0.05)


class Slow:
    """A server that answers a request once it is to abort it, each time with the next of ``parts``."""

    def __init__(self, *parts: list[int]) -> None:
        self.parts, self.asked, self.seconds = list(parts), list[tuple[list[int], int]](), 0.0  # of the caller's
        self.aborted: dict[str, threading.Event] = {}

    def __call__(self, path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path in ("/generate", "/abort"):
            aborted = self.aborted.setdefault(body["id"], threading.Event())
        if path == "/abort":
            aborted.set()
        if path != "/generate":
            return 200, {}
        self.asked.append((body["prompt"], body["new"]))
        assert aborted.wait(LIMIT)
        return 200, {"label": "7@t", "tokens": self.parts.pop(0), "finish": "abort"}


def sampled(slow: Slow, answer: Answer | None = None, **changes: Any) -> list[Completion]:
    async def ask() -> list[Completion]:
        engine = engine_of([fake])
        await push(engine, 7)
        fake.answer = answer or slow
        began = time.monotonic()
        try:
            return list(await engine.generate(replace(LONG, **changes)))
        finally:
            slow.seconds = time.monotonic() - began
            await engine.close()

    with running(1) as (fake,):
        return asyncio.run(ask())


def test_a_completion_that_runs_too_long_ends_with_what_it_has() -> None:
    slow = Slow([3, 4])
    (late,) = sampled(slow)
    assert plain(late) == ([3, 4], [-0.5] * 2, "length", ((0, 7),), None)
    assert slow.seconds >= 0.05  # it had its time
    assert slow.asked == [([1, 2], 5)]


def test_one_that_ends_at_that_moment_has_its_own_reason() -> None:
    (stopped,) = sampled(Slow([3, 9]))
    assert plain(stopped) == ([3, 9], [-0.5] * 2, "stop", ((0, 7),), None)


def test_one_without_a_token_waited_for_a_slot_and_gets_twice_as_long_each_time() -> None:
    slow = Slow([], [], [3])
    (late,) = sampled(slow)
    assert plain(late) == ([3], [-0.5], "length", ((0, 7),), None)
    assert [prompt for prompt, _ in slow.asked] == [[1, 2]] * 3
    assert slow.seconds >= 0.05 + 0.1 + 0.2


def test_what_was_begun_before_a_resume_has_its_time_again() -> None:
    slow = Slow([5])
    (late,) = sampled(slow, begun=completion((3, 4), finish="abort", spans=((0, 2),)))
    assert plain(late) == ([3, 4, 5], [-0.5] * 3, "length", ((0, 2), (2, 7)), None)
    assert slow.seconds >= 0.05


def test_what_its_time_had_ended_before_a_resume_stays_ended() -> None:
    slow, ended = Slow([5]), completion((3, 4), finish="length", spans=((0, 2),))
    (late,) = sampled(slow, begun=ended)
    assert plain(late) == plain(ended)
    assert slow.asked == []


def test_the_completions_of_one_request_end_together() -> None:
    late = sampled(Slow([3, 4]), num_completions=3)
    assert [plain(one) for one in late] == [([3, 4], [-0.5] * 2, "length", ((0, 7),), None)] * 3


def test_time_between_attempts_and_in_attempts_that_failed_does_not_count() -> None:
    """Twice the server fails after most of the time, and the third attempt has all of it."""
    slow, times = Slow([3, 4]), list[float]()

    def failing(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/generate" and len(times) < 2:
            times.append(time.monotonic())
            while time.monotonic() < times[-1] + 0.2:
                pass
            return 500, {}
        return slow(path, body, number)

    (late,) = sampled(slow, failing, max_seconds=0.25)
    assert late.finish_reason == "length"
    assert len(times) == 2
    assert slow.seconds >= 0.2 + 0.2 + 0.25


@pytest.mark.parametrize("keys", [[], ["rollout.server.replicas=2"], ["rollout=vllm"]])
def test_only_servers_can_end_a_completion_before_the_others(keys: list[str]) -> None:
    given = [*keys, "rollout.max_seconds=30"]
    if keys:
        assert load_config("tiny_cpu", given).rollout.max_seconds == 30
        return
    said = "max_seconds=30, but rollout.engine=local samples a whole batch in one call .* set rollout.server.replicas"
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", given)


def test_the_metric_counts_those_that_were_cut_before_their_length() -> None:
    """Two of six: the others stopped, or have as many tokens as they may have."""
    ends: list[tuple[int, FinishReason]] = [(1, "length"), (3, "length"), (4, "length"), (4, "stop"), (2, "stop")]
    ends.append((4, "length"))
    answers = [completion([1] * length, finish=reason) for length, reason in ends]
    group = single_turns(Prompt(id="p", text="", token_ids=(1,), answer=""), answers, [""] * 6, [0.0] * 6)
    section = RolloutSection(max_new_tokens=4, max_seconds=30)
    assert late_row(group.trajectories, section) == {"response/late_fraction": pytest.approx(2 / 6)}
    assert late_row(group.trajectories, RolloutSection(max_new_tokens=4)) == {}
