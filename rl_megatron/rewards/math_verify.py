"""Rewards a completion whose last expression equals the answer mathematically, by the math-verify library.

The library runs in a few processes (math_verify_worker.py): its regular expressions and powers of integers hold
Python's lock, for hours on some texts, and would stop the event loop. A thread waits for each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.scoring import queued
from rl_megatron.types import Completion, Prompt, Scored

LIMIT_SECONDS = 3.0  # of a processor, for one completion: 100 kB of ordinary text take 0.02
WAIT_SECONDS = 60.0  # for a process, on a busy machine or one that stopped it
_MOST_SHOWN = 500  # bytes of a process's last words in an error
_PROCESSES = min(4, len(os.sched_getaffinity(0)))
_COMMAND = (sys.executable, "-P", "-m", "rl_megatron.rewards.math_verify_worker")


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
        return _mine.ask(answer, text)

    told = await asyncio.wrap_future(_threads.submit(ask))
    if "missing" in told:
        raise ConfigError(
            f"reward.function=math_verify needs the math-verify library ({told['missing']}); pip install math-verify"
        )
    return told


class _Worker(threading.local):
    """The process of the calling thread, which ends with it; another one where the last has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  of standard error, as long as the thread

    def ask(self, answer: str, text: str | None) -> dict[str, Any]:
        line = json.dumps([LIMIT_SECONDS, answer, text]).encode() + b"\n"
        for _ in range(2):  # what ended it without its own limit may have nothing to do with this text
            process = self._process = self._process or new_process(self._log)
            assert process.stdin is not None
            assert process.stdout is not None
            late = threading.Timer(WAIT_SECONDS, process.kill)
            late.start()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                said = process.stdout.readline()
            except BrokenPipeError:
                said = b""
            finally:
                late.cancel()
            if said.endswith(b"\n"):
                told: dict[str, Any] = json.loads(said)
                return told
            self._process = None
            process.kill()
            process.communicate()
            if process.returncode == -signal.SIGPROF:
                return {}
            if process.returncode >= 0:
                raise RewardError(f"math-verify's process ended with status {process.returncode}: {self._last_words()}")
        return {}

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_MOST_SHOWN:].decode(errors="replace").strip()


def new_process(log: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process, which ends with this one. What it writes to standard error goes to ``log``."""
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LANG": "C.UTF-8"},
    )


_threads = ThreadPoolExecutor(_PROCESSES, "math-verify")
_mine = _Worker()
