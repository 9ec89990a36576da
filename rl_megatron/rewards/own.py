"""Reward functions of the user's own: run where they can end and hold up nobody, their numbers checked there too.

Such a function gives numbers; `scored` alone makes a `Scored` of each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set, Sized
from itertools import islice

from rl_megatron.errors import RewardError
from rl_megatron.rewards.threads import in_daemon_thread, on_loop_apart
from rl_megatron.types import Completion, Prompt, Scored
from rl_megatron.user_code import describe_error


class Plain:
    """A plain function as a RewardFunction, in a thread. What it raises is a RewardError with its name and text."""

    def __init__(self, function: Callable[[Prompt, Sequence[Completion], Sequence[str]], object]) -> None:
        self._function = function

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[Scored]:
        """Calls the function in a daemon thread."""

        def call() -> Sequence[Scored]:
            try:
                return scored(self._function(prompt, completions, texts), len(completions))
            except BaseException as error:
                raise RewardError(describe_error(error)) from error

        return await in_daemon_thread(call)


class Async:
    """An ``async`` function likewise, on an event loop apart."""

    def __init__(self, function: Callable[[Prompt, Sequence[Completion], Sequence[str]], Awaitable[object]]) -> None:
        self._function = function

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[Scored]:
        """Awaits the function on an event loop apart."""

        async def call() -> Sequence[Scored]:
            try:
                return scored(await self._function(prompt, completions, texts), len(completions))
            except BaseException as error:
                raise RewardError(describe_error(error)) from error

        return await on_loop_apart(call)


def scored(given: object, count: int) -> tuple[Scored, ...]:
    """``count`` numbers that a function gave, NaN and infinity among them. At most one more than ``count`` is read.

    Raises RewardError that says what was given instead, and what a number raises that is none.
    """
    wanted = "a list of one number for each completion is wanted"
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise RewardError(f"gave {_a(given)}; {wanted}")
    rewards = []
    for i, value in enumerate(islice(given, count + 1)):
        if value is None or isinstance(value, str | bytes):
            raise RewardError(f"gave {_a(value)} for completion {i}; {wanted}")
        rewards.append(Scored(total=float(value)))
    if len(rewards) != count:
        many = len(given) if isinstance(given, Sized) else f"more than {count}" if rewards[count:] else len(rewards)
        raise RewardError(f"gave {many} rewards for {count} completions; one for each is wanted")
    return tuple(rewards)


def _a(value: object) -> str:
    """None, or its type and how it begins where that is text."""
    shown = f" {value[:40]!r}" if isinstance(value, str | bytes) else ""
    return "None" if value is None else f"a {type(value).__name__:.80}{shown}"
