"""The names that ``reward.function`` may have, and functions of the user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.exact_match import exact_match
from rl_megatron.rewards.final_number import final_number
from rl_megatron.rewards.math_verify import math_verify
from rl_megatron.rewards.threads import in_daemon_thread
from rl_megatron.types import Completion, Prompt

REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "final_number": final_number,
    "math_verify": math_verify,
}


def resolve_reward(name: str) -> RewardFunction:
    """The reward function of a registered name or of ``package.module:function``.

    Your own takes (prompt, completions, texts) and returns one float per completion; it may be ``async``. One that is
    not runs in a thread, so it may block. Raises ConfigError that names what is not there and what is near it.
    """
    if ":" in name:
        return _load(name)
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"reward.function={name!r} is unknown; {hint}allowed: {', '.join(REWARDS)}, "
            "or package.module:function of your own"
        )
    return REWARDS[name]


def _load(path: str) -> RewardFunction:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f"reward.function={path!r}: write it as package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"reward.function={path!r}: importing {module_name} failed: {error}") from error
        raise ConfigError(
            f"reward.function={path!r}: no module {error.name!r}; install it or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"reward.function={path!r}: importing {module_name} raised {error!r}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, attribute) else "is not there"
        near = difflib.get_close_matches(attribute, [n for n, v in vars(module).items() if callable(v)], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"reward.function={path!r}: {attribute!r} of {module_name} {what}{hint}")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return cast(RewardFunction, function)
    return _Blocking(function)


class _Blocking:
    """A plain function as a RewardFunction."""

    def __init__(self, function: Callable[[Prompt, Sequence[Completion], Sequence[str]], Sequence[float]]) -> None:
        self._function = function

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[float]:
        return await in_daemon_thread(partial(self._function, prompt, completions, texts))
