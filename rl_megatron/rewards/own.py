"""Runs the user's own reward functions off the event loop, so that they cannot block it, and checks their numbers.

Such a function returns numbers, or with ``reward.steps`` steps of completions; `scored` turns each into a `Scored`.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set, Sized
from itertools import islice, pairwise
from math import fsum
from typing import SupportsIndex

from rl_megatron.errors import RewardError
from rl_megatron.rewards.threads import in_daemon_thread, on_loop_apart
from rl_megatron.types import Completion, Prompt, Scored
from rl_megatron.user_code import describe_error


class Plain:
    """Runs a plain function in a thread. Its exceptions become RewardErrors with their type and text."""

    def __init__(
        self, function: Callable[[Prompt, Sequence[Completion], Sequence[str]], object], *, steps: bool = False
    ) -> None:
        self._function, self._steps = function, steps

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[Scored]:
        """Calls the function in a daemon thread."""

        def call() -> Sequence[Scored]:
            try:
                return scored(self._function(prompt, completions, texts), texts, steps=self._steps)
            except BaseException as error:
                raise RewardError(describe_error(error)) from error

        return await in_daemon_thread(call)


class Async:
    """Runs an ``async`` function on a separate event loop. Its exceptions become RewardErrors likewise."""

    def __init__(
        self,
        function: Callable[[Prompt, Sequence[Completion], Sequence[str]], Awaitable[object]],
        *,
        steps: bool = False,
    ) -> None:
        self._function, self._steps = function, steps

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[Scored]:
        """Awaits the function on the separate event loop."""

        async def call() -> Sequence[Scored]:
            try:
                return scored(await self._function(prompt, completions, texts), texts, steps=self._steps)
            except BaseException as error:
                raise RewardError(describe_error(error)) from error

        return await on_loop_apart(call)


def scored(given: object, texts: Sequence[str], *, steps: bool = False) -> tuple[Scored, ...]:
    """Check that a function returned a number for each text (NaN and infinity count), reading at most one more; with
    ``steps``, instead of any of them, the (end, reward) of each of its steps, whose sum is the number.

    Raises RewardError that says what it returned instead, and whatever converting a value to float raises.
    """
    wanted, count = "it must return a list with one number for each completion", len(texts)
    wanted += ", or a list of its steps' (end, reward)" if steps else ""
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise RewardError(f"returned {_a(given)}; {wanted}")
    rewards = []
    for i, value in enumerate(islice(given, count + 1)):
        if value is None or isinstance(value, str | bytes):
            raise RewardError(f"returned {_a(value)} for completion {i}; {wanted}")
        if isinstance(value, list | tuple) and not steps:
            raise RewardError(
                f"returned {_a(value)} for completion {i}; {wanted}. Steps are read with reward.steps=true"
            )
        rewards.append(_of_steps(value, i, texts) if isinstance(value, list | tuple) else Scored(total=float(value)))
    if len(rewards) != count:
        many = len(given) if isinstance(given, Sized) else f"more than {count}" if rewards[count:] else len(rewards)
        raise RewardError(f"returned {many} rewards for {count} completions; it must return one for each")
    return tuple(rewards)


def _of_steps(given: Sequence[object], index: int, texts: Sequence[str]) -> Scored:
    found = []
    for step in given:
        if not isinstance(step, list | tuple) or len(step) != 2 or not isinstance(step[0], SupportsIndex):
            raise RewardError(f"returned {_a(step)} as a step of completion {index}; it must be (end, reward)")
        found.append((operator.index(step[0]), float(step[1])))
    length = len(texts[index]) if index < len(texts) else 0
    ends = [0, *(end for end, _ in found)]
    if not found or ends[-1] > length or any(a >= b for a, b in pairwise(ends)):
        raise RewardError(
            f"returned steps of completion {index} that end at {ends[1:]!s:.80}; there must be one at least, and ends "
            f"must ascend, from 1 to the {length} characters of its text"
        )
    return Scored(total=fsum(reward for _, reward in found), steps=tuple(found))


def _a(value: object) -> str:
    """None, or the type and, of text, the beginning."""
    shown = f" {value[:40]!r}" if isinstance(value, str | bytes) else ""
    return "None" if value is None else f"a {type(value).__name__:.80}{shown}"
