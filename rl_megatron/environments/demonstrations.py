"""What an environment demonstrates for a warm start, looked at before the model learns it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from rl_megatron.environments.protocol import Demonstrating, Environment
from rl_megatron.errors import EnvironmentFailed
from rl_megatron.types import Prompt
from rl_megatron.user_code import describe_error


def demonstrated(
    made: Callable[[], Environment], function: str | None, tasks: Sequence[Prompt], seeds: Sequence[int]
) -> list[Sequence[str]]:
    """The texts of each task's ``demonstration``, all by one environment, which is made for the first.

    Raises EnvironmentFailed, which names ``function`` and the task, with what it raised, or returned in place of texts.
    """
    with _naming(function, tasks[0], ", for which the environment is made,"):
        environment = made()
    return [_texts(environment, function, task, seed) for task, seed in zip(tasks, seeds, strict=True)]


def _texts(environment: Environment, function: str | None, task: Prompt, seed: int) -> Sequence[str]:
    with _naming(function, task):
        given: object = cast("Demonstrating", environment).demonstration(task, seed)
        problem = _problem(given)
    if problem is not None:
        raise EnvironmentFailed(
            f"{_said(function, task)} {problem}; it must return a list of texts, the model's, what it reads, the "
            "model's, and so on"
        )
    return cast("Sequence[str]", given)


@contextmanager
def _naming(function: str | None, task: Prompt, which: str = "") -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # the user's code may exit
        raise EnvironmentFailed(f"{_said(function, task)}{which} {describe_error(error)}; fix it") from error


def _said(function: str | None, task: Prompt) -> str:
    return f"environment {function!r}: demonstration of prompt {task.id!r} ({task.text!r:.60})"


def _problem(given: object) -> str | None:
    """Why it is no texts. A text is a sequence of texts, too: its characters would be learned in turns."""
    if inspect.iscoroutine(given):
        given.close()
        return "is async, which it may not be"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        return f"returned {given!r:.80}"
    for place, one in enumerate(given):
        if not isinstance(one, str):
            return f"returned {one!r:.80} as text {place}"
        if not _valid(one):
            return f"returned {one!r:.80} as text {place}, which holds half of a surrogate pair"
    return None


def _valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
