"""Rewards a completion whose last expression equals the answer mathematically, by the math-verify library.

The library runs in a few processes (math_verify_worker.py): its regular expressions and powers of integers hold
Python's lock, for hours on some texts, and would stop the event loop. A thread waits for each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_megatron.bounded import BoundedProcess, LimitExceeded, ProcessFailed
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.scoring import queued
from rl_megatron.types import Completion, Prompt, Scored

LIMIT_SECONDS = 3.0  # of a processor, for one completion: 100 kB of ordinary text take 0.02
_PROCESSES = min(4, len(os.sched_getaffinity(0)))


async def math_verify(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
    """1.0 if math-verify finds the two equal, else 0.0, also for a text that it cannot parse or not in 3 s of a
    processor.

    The answer may be a number, LaTeX with or without its dollars, or GSM8K's (the part after ``####``).
    Raises RewardError for an answer that is not an expression, ConfigError if the library is missing.
    """
    answer = prompt.answer.rsplit("####", 1)[-1].strip()
    with queued() as begun:
        if not (await _asked(answer, None)).get("known"):
            raise RewardError(f"prompt {prompt.id!r}: math-verify finds no expression in its answer {answer!r:.80}")
        told = await asyncio.gather(*(_asked(answer, text, begun) for text in texts))
    return [Scored(total=one.get("total", 0.0), answer=one.get("answer", "")) for one in told]


async def _asked(answer: str, text: str | None, begun: Callable[[], None] | None = None) -> dict[str, Any]:
    """What a process says, which is asked as soon as one is free; empty if it ended over this."""
    loop = asyncio.get_running_loop()

    def ask() -> dict[str, Any]:
        if begun is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(begun)
        try:
            return dict(_mine.process.ask(LIMIT_SECONDS, answer, text))
        except LimitExceeded:
            return {}

    try:
        told = await asyncio.wrap_future(_threads.submit(ask))
    except ProcessFailed as error:
        raise RewardError(f"math-verify: {error}") from error
    if "missing" in told:
        raise ConfigError(
            f"reward.function=math_verify needs the math-verify library ({told['missing']}); pip install math-verify"
        )
    return told


class _Mine(threading.local):
    """The process of the calling thread, which ends with it."""

    def __init__(self) -> None:
        self.process = BoundedProcess("rl_megatron.rewards.math_verify_worker")


_threads = ThreadPoolExecutor(_PROCESSES, "math-verify")
_mine = _Mine()
