"""Rewards a completion whose last number equals the answer's (GSM8K: the number after ``####``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rl_megatron.errors import RewardError
from rl_megatron.rewards.symbols import number_of, to_ascii, to_latex, without_reasons
from rl_megatron.rewards.threads import in_daemon_thread
from rl_megatron.types import Completion, Prompt, Scored

MAX_DIGITS = 1000  # a sampled number with more equals no answer; Python refuses to parse 4300 and more

_POWER = r"(?:[eE][-+]?\d{1,3}(?!\w|\.\d))?"  # of ten; more digits would make integers of any size
_DIGITS = rf"(?:(?:\d{{1,3}}(?:(?:,|\{{,\}})\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+){_POWER}"
# A minus is a sign unless it subtracts from something before it: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)%])[-+\u2212])?\$?(?P<inner>(?<=\$)[-+\u2212])?(?P<top>{_DIGITS})(?:/(?P<bottom>\d+(?:\.\d+)?{_POWER}))?(?P<raised>[⁺⁻]?[⁰¹²³⁴-⁹]+)?",
    re.ASCII,
)
_FORMULA = re.compile(r"\\[dtc]?frac|\\sqrt|\\pi\b|\^")


async def final_number(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
    """1.0 if the numbers are equal as exact fractions, else 0.0: ``0.5``, ``1/2``, ``½``, ``.50``, ``5e-1`` and
    ``$0.50`` are equal.

    Ignores units (``%`` and ``$``) and commas between thousands. Raises RewardError if the answer holds no number.
    """
    wanted = last_number(prompt.answer.rsplit("####", 1)[-1])
    if wanted is None:
        raise RewardError(f"prompt {prompt.id!r}: its answer {prompt.answer!r:.80} holds no number to compare with")
    return await in_daemon_thread(lambda: [_judged(last_number(text), wanted) for text in texts])


def _judged(number: Fraction | None, wanted: Fraction) -> Scored:
    return Scored(total=float(number == wanted), answer="" if number is None else str(number))


def is_formula(answer: str) -> bool:
    """Whether the answer itself, behind ``####`` or in ``\\boxed``, is a formula in LaTeX, of which the last number is
    a part: 2 of ``\\frac{1}{2}``."""
    return _FORMULA.search(to_latex(answer).rsplit("####", 1)[-1].rsplit("\\boxed", 1)[-1]) is not None


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``; None if there is none, if it is under a root sign, or if it has more than
    ``MAX_DIGITS`` digits."""
    text, last = without_reasons(to_ascii(text)), None
    for last in _NUMBER.finditer(text):  # noqa: B007  # only the last counts
        pass
    if last is None or len(last[0]) > MAX_DIGITS or text[: last.start()].rstrip(" (").endswith(("√", "∛", "∜")):
        return None
    value = Fraction(last["top"].replace("{,}", "").replace(",", ""))
    if last["bottom"] is not None:
        divisor = Fraction(last["bottom"])
        if divisor == 0:
            return None
        value /= divisor
    if last["raised"] is not None:
        power = number_of(last["raised"][:5])
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if abs(power) * bits > 3 * MAX_DIGITS or (power < 0 and value == 0):
            return None
        value **= power
    negative = (last["sign"] or last["inner"] or "+") != "+"
    return -value if negative else value
