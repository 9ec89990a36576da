"""Compares completions with answers by math-verify, in a process that the kernel ends when one takes too long.

``python -m rl_megatron.rewards.math_verify_worker`` reads lines of JSON from standard input, each the seconds of a
processor that it may take, an answer, and a completion or null, and writes one for each to standard output. It ends
when its input closes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rl_megatron.sandbox import kernel

_MARKED = ("$", r"\boxed", r"\(", r"\[")  # by which the package knows LaTeX
_MEASURE = re.compile(  # a number, with its thousands and words for its unit, of which LaTeX would make products
    r"[-+]?[€£¥]?(?:\d{1,3}(?:[ ,]\d{3})+|\d*)(?:\.\d+)?\s*%?(?:\s+[A-Za-z]{3,})*", re.ASCII
)
_SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\w|\.\d)", re.ASCII)


def main() -> int:
    """Answer each line of standard input."""
    kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)  # also while it computes
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        print(json.dumps(_told(*json.loads(line))), file=out, flush=True)
    return 0


def _told(seconds: float, answer: str, text: str | None) -> dict[str, Any]:
    """What ``text`` is worth and what was read in it, or without one whether the answer is an expression.

    math-verify's own limits are off. They are handlers of Python's, which do not run within the power of two integers.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        return {"missing": str(error)}
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    signal.setitimer(signal.ITIMER_PROF, seconds)
    wanted = _expression(answer)
    if text is None:
        told: dict[str, Any] = {"known": bool(wanted)}
    else:
        read = parse(_positional(text), parsing_timeout=None)
        told = {"total": float(verify(wanted, read, timeout_seconds=None, raise_on_error=False)), "answer": ""}
        with contextlib.suppress(ValueError, RecursionError):  # too deep, or too many digits, to be written
            told["answer"] = str(read[0]) if read else ""
    signal.setitimer(signal.ITIMER_PROF, 0)
    return told


@lru_cache(maxsize=256)
def _expression(answer: str) -> list[Any]:
    """What the package reads in an answer; empty if it reads nothing. It takes the bare numbers out of LaTeX without
    dollars, so only a number is read as plain text first."""
    from math_verify import parse

    answer = _positional(answer)
    readings = [answer, f"${answer}$"]
    if not _MEASURE.fullmatch(answer) and not any(mark in answer for mark in _MARKED):
        readings.reverse()
    return next(filter(None, (parse(one, parsing_timeout=None) for one in readings)), [])


def _positional(text: str) -> str:
    """The text with 0.001 in place of 1e-3, in which the package reads Euler's number, or 1."""
    return _SCIENTIFIC.sub(lambda number: format(Decimal(number[0]), "f"), text)


if __name__ == "__main__":
    sys.exit(main())
