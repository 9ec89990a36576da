"""Rewards a completion whose last expression equals the answer mathematically, by the math-verify library."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.threads import in_daemon_thread
from rl_megatron.types import Completion, Prompt, Scored

_MARKED = ("$", r"\boxed", r"\(", r"\[")  # by which the package knows LaTeX
_MEASURE = re.compile(  # a number, with its thousands and words for its unit, of which LaTeX would make products
    r"[-+]?[€£¥]?(?:\d{1,3}(?:[ ,]\d{3})+|\d*)(?:\.\d+)?\s*%?(?:\s+[A-Za-z]{3,})*", re.ASCII
)


async def math_verify(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
    """1.0 if math-verify finds the two equal, else 0.0, also for a text that it cannot parse.

    The answer may be a number, LaTeX with or without its dollars, or GSM8K's (the part after ``####``). math-verify's
    own time limits need the main thread's signals, so they are off: ``reward.timeout_seconds`` bounds this call.
    Raises RewardError for an answer that is not an expression, ConfigError if the library is missing.
    """
    return await in_daemon_thread(partial(_score, prompt, list(texts)))


def _score(prompt: Prompt, texts: Sequence[str]) -> list[Scored]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            f"reward.function=math_verify needs the math-verify library ({error}); pip install math-verify"
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    answer = prompt.answer.rsplit("####", 1)[-1].strip()
    if not (wanted := _expression(answer)):
        raise RewardError(f"prompt {prompt.id!r}: math-verify finds no expression in its answer {answer!r:.80}")
    out = []
    for text in texts:
        read = parse(text, parsing_timeout=None)
        right = verify(wanted, read, timeout_seconds=None, raise_on_error=False)
        out.append(Scored(total=float(right), answer=str(read[0]) if read else ""))
    return out


def _expression(answer: str) -> list[Any]:
    """What the package reads in an answer; empty if it reads nothing. It takes the bare numbers out of LaTeX without
    dollars, so only a number is read as plain text first."""
    from math_verify import parse

    readings = [answer, f"${answer}$"]
    if not _MEASURE.fullmatch(answer) and not any(mark in answer for mark in _MARKED):
        readings.reverse()
    return next(filter(None, (parse(one, parsing_timeout=None) for one in readings)), [])
