"""Runs the user's own reward functions off the event loop, so that they cannot block it, and checks their numbers.

Such a function returns numbers; `scored` turns each into a `Scored`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set, Sized
from itertools import islice

from rl_megatron.errors import RewardError
from rl_megatron.rewards.threads import in_daemon_thread, on_loop_apart
from rl_megatron.types import Completion, Prompt, Scored
from rl_megatron.user_code import describe_error


class Plain:
    """Runs a plain function in a thread. Its exceptions become RewardErrors with their type and text."""

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
    """Runs an ``async`` function on a separate event loop. Its exceptions become RewardErrors likewise."""

    def __init__(self, function: Callable[[Prompt, Sequence[Completion], Sequence[str]], Awaitable[object]]) -> None:
        self._function = function

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[Scored]:
        """Awaits the function on the separate event loop."""

        async def call() -> Sequence[Scored]:
            try:
                return scored(await self._function(prompt, completions, texts), len(completions))
            except BaseException as error:
                raise RewardError(describe_error(error)) from error

        return await on_loop_apart(call)


def scored(given: object, count: int) -> tuple[Scored, ...]:
    """Check that a function returned ``count`` numbers (NaN and infinity count), reading at most one more.

    Raises RewardError that says what it returned instead, and whatever converting a value to float raises.
    """
    wanted = "it must return a list with one number for each completion"
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise RewardError(f"returned {_a(given)}; {wanted}")
    rewards = []
    for i, value in enumerate(islice(given, count + 1)):
        if value is None or isinstance(value, str | bytes):
            raise RewardError(f"returned {_a(value)} for completion {i}; {wanted}")
        rewards.append(Scored(total=float(value)))
    if len(rewards) != count:
        many = len(given) if isinstance(given, Sized) else f"more than {count}" if rewards[count:] else len(rewards)
        raise RewardError(f"returned {many} rewards for {count} completions; it must return one for each")
    return tuple(rewards)


def _a(value: object) -> str:
    """None, or the type and, of text, the beginning."""
    shown = f" {value[:40]!r}" if isinstance(value, str | bytes) else ""
    return "None" if value is None else f"a {type(value).__name__:.80}{shown}"
