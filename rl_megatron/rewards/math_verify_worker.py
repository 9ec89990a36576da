"""Compares completions with answers by math-verify, in a process that ends when one takes too long.

rules.py calls ``python -m rl_megatron.rewards.math_verify_worker``.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from rl_megatron.bounded import answer_calls
from rl_megatron.rewards.symbols import mark_formulas, remove_reasons, to_latex
from rl_megatron.sandbox import keeper

MEMORY_BYTES = 4 << 30
_MARKED = ("$", r"\boxed", r"\(", r"\[")  # marks by which the package recognizes LaTeX
_MEASURE = re.compile(  # a number, with its thousands and words for its unit, which LaTeX would read as products
    r"[-+]?[€£¥]?(?:\d{1,3}(?:[ ,]\d{3})+|\d*)(?:\.\d+)?\s*%?(?:\s+[A-Za-z]{3,})*", re.ASCII
)
_SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\w|\.\d)", re.ASCII)

_LETTER = re.compile(r"\(?[A-J]\)?")  # the answer to a multiple choice
_CHOICE = re.compile(r"(?:(?i:\b(?:answer|option|choice)(?: is)?)|^)[ :*_(]*([A-J])\b[)*_.]* *$", re.MULTILINE)


def _score(answer: str, text: str | None) -> dict[str, Any]:
    """Returns the reward of ``text`` and the value read in it; without a text, if the answer is an expression.

    math-verify's own limits are off. They are Python's signal handlers, which do not run within a power of integers.
    """
    try:
        from math_verify import grader, parse, verify
    except ImportError as error:
        return {"missing": str(error)}
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    if not isinstance(grader.sympy_numeric_eq, partial):  # verify calls it for each number, also within sets
        grader.sympy_numeric_eq = partial(_equal, grader.sympy_numeric_eq)
    wanted = _expression(answer)
    if text is None:
        reply: dict[str, Any] = {"known": bool(wanted)}
    else:
        read = parse(_readable(text, answer), parsing_timeout=None)
        reply = {"total": float(verify(wanted, read, timeout_seconds=None, raise_on_error=False)), "answer": ""}
        with contextlib.suppress(ValueError, RecursionError):  # too deep, or too many digits, to be printed
            reply["answer"] = str(read[0]) if read else ""
    return reply


def _equal(package: Callable[..., bool], one: Any, other: Any, *places: int) -> bool:
    """True if the package, which compares six decimal places, finds two numbers equal and they are close. They may
    differ by 1e-5 of them if one is a decimal, otherwise by 1e-30. Decimals that are equal as fractions are equal."""
    from math_verify.grader import Float, Rational, get_pct_val

    same = package(one, other, *places)
    if get_pct_val(one) or get_pct_val(other):  # 9 % is 9, and 0.09
        return same
    try:
        fractions = [x.xreplace({f: Rational(str(f)) for f in x.atoms(Float)}).doit() for x in (one, other)]
        difference = fractions[0] - fractions[1]
        if not same:
            return bool(difference == 0)
        sizes = [abs(x.evalf(chop=False)) for x in (difference, *fractions)]
        if difference == 0 or not all(size.is_Float or size.is_Integer for size in sizes):
            return same
        return bool(sizes[0] <= max(sizes[1:]) * Rational(1, 10 ** (5 if one.has(Float) or other.has(Float) else 30)))
    except (AttributeError, TypeError, ValueError):  # matrices
        return same


@lru_cache(maxsize=256)
def _expression(answer: str) -> list[Any]:
    """Returns the package's reading of an answer; empty if it reads nothing. From LaTeX without dollars it takes only
    bare numbers, so only a number is read as plain text first."""
    from math_verify import parse

    answer = _positional(to_latex(answer))
    readings = [mark_formulas(answer), f"${answer}$"]
    if not _MEASURE.fullmatch(answer) and not any(mark in answer for mark in _MARKED):
        readings.reverse()
    return next(filter(None, (parse(one, parsing_timeout=None) for one in readings)), [])


def _readable(text: str, answer: str) -> str:
    """Returns a completion's text with parts as LaTeX that the package would otherwise overlook or read in part."""
    text = _positional(remove_reasons(to_latex(text)))
    if not any(mark in text for mark in _MARKED) and _LETTER.fullmatch(answer) and (found := _CHOICE.findall(text)):
        return rf"{text} \boxed{{{found[-1]}}}"
    return mark_formulas(text)


def _positional(text: str) -> str:
    """Returns the text with 0.001 in place of 1e-3, in which the package reads Euler's number, or 1."""
    return _SCIENTIFIC.sub(lambda number: format(Decimal(number[0]), "f"), text)


if __name__ == "__main__":
    keeper.prctl(keeper.PDEATHSIG, signal.SIGKILL)  # kills this process even while it computes
    with contextlib.suppress(ImportError):
        import math_verify  # noqa: F401  its seconds are of no call
    answer_calls(_score, MEMORY_BYTES)
