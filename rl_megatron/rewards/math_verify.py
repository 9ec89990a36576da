"""Rewards a completion whose last expression equals the answer mathematically, by the math-verify library."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.threads import in_daemon_thread
from rl_megatron.types import Completion, Prompt, Scored


async def math_verify(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
    """1.0 if math-verify finds the two equal, else 0.0, also for a text that it cannot parse.

    The answer may be plain, LaTeX, or GSM8K's (the part after ``####``). math-verify's own time limits need the main
    thread's signals, so they are off: ``reward.timeout_seconds`` bounds this call.
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
    wanted = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not wanted:
        raise RewardError(f"prompt {prompt.id!r}: math-verify finds no expression in its answer {answer!r:.80}")
    out = []
    for text in texts:
        read = parse(text, parsing_timeout=None)
        right = verify(wanted, read, timeout_seconds=None, raise_on_error=False)
        out.append(Scored(total=float(right), answer=str(read[0]) if read else ""))
    return out
