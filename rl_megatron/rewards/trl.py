"""Calls reward functions that are written for TRL, whose parameters have TRL's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rl_megatron.errors import RewardError
from rl_megatron.files import parse
from rl_megatron.types import Completion, Prompt

_GIVEN = ("prompts", "completions", "completion_ids")
_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")  # TRL's trainer passes these


def is_trl(function: Callable[..., object]) -> bool:
    """True if the function takes ``completions`` and the row's columns, but no ``texts``, as TRL calls it."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some of C
        return False
    return "completions" in names and "texts" not in names and ("prompts" in names or names[0] == "completions")


def as_trl(function: Callable[..., Any]) -> Callable[[Prompt, Sequence[Completion], Sequence[str]], Any]:
    """Returns a function of prompt, completions and texts that calls ``function`` with TRL's keywords.

    Prompts and completions are texts, or lists of messages if the row's prompt is one. Each field of the row is a list
    of its value, once for each completion. The answer has the name ``answer``, or that of the one parameter that the
    row does not have. Raises RewardError for other parameters that have no value.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = {one.name: one.default is one.empty for one in parameters if one.kind.name[:3] != "VAR"}

    def call(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> Any:
        messages = _messages(prompt)
        said = [[{"role": "assistant", "content": text}] for text in texts] if messages else list(texts)
        asked = messages or prompt.question or prompt.text
        columns = {name: value for name, value in prompt.meta.items() if name not in _GIVEN}
        missing = [one for one, is_needed in named.items() if is_needed and one not in (*_GIVEN, *columns)]
        answer = "answer" if "answer" in missing or not missing else missing[0]
        if missing not in ([], [answer]) or answer in _TRAINER:
            missing = [one for one in missing if one != "answer"]
            raise RewardError(
                f"its parameters {', '.join(missing)} are not fields of the row, which has "
                f"{', '.join(sorted({*columns, 'answer'}))}; name these, or take prompt, completions, texts"
            )
        columns = {"answer": prompt.answer, **columns, **dict.fromkeys(missing, prompt.answer)}
        given = {name: [value] * len(texts) for name, value in columns.items()}
        given |= {"prompts": [asked] * len(texts), "completions": said}
        given["completion_ids"] = [completion.token_ids.tolist() for completion in completions]
        return function(**{name: value for name, value in given.items() if takes_all or name in named})

    return call


def _messages(prompt: Prompt) -> list[Any]:
    """The messages of the row's prompt; empty if it is a text."""
    try:
        found = parse(prompt.question) if prompt.question.startswith("[{") else []
    except ValueError:
        return []
    is_messages = isinstance(found, list) and all(isinstance(one, dict) and "role" in one for one in found)
    return found if is_messages else []
