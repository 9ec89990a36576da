"""Rewards by a rule: an equal text, an equal last number (GSM8K: after ``####``), an equal value, a pattern, a length.

math-verify runs in a few processes (math_verify_worker.py): its regular expressions and powers of integers hold
Python's lock, for hours on some texts, and would stop the event loop. A thread waits for each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

from rl_megatron.bounded import BoundedProcess, LimitExceeded, ProcessFailed
from rl_megatron.config.sections.reward import LengthSection, RewardSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.scoring import paused_while_queued
from rl_megatron.rewards.symbols import read_digits, remove_reasons, to_ascii, to_latex
from rl_megatron.rewards.threads import run_in_daemon_thread
from rl_megatron.types import Completion, Prompt, RewardResult


async def exact_match(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[RewardResult]:
    """Returns 1.0 if a text equals ``prompt.answer``, otherwise 0.0."""
    answer = prompt.answer.strip()
    return [RewardResult(total=float(text.strip() == answer), answer=text.strip()) for text in texts]


MAX_DIGITS = 1000  # a sampled number with more equals no answer; Python refuses to parse 4300 and more

_POWER = r"(?:[eE][-+]?\d{1,3}(?!\w|\.\d))?"  # a power of ten; more digits would allow integers of any size
_DIGITS = rf"(?:(?:\d{{1,3}}(?:(?:,|\{{,\}})\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+){_POWER}"
# A minus is a sign unless it subtracts from something before it: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)%])[-+\u2212])?\$?(?P<inner>(?<=\$)[-+\u2212])?(?P<top>{_DIGITS})(?:/(?P<bottom>\d+(?:\.\d+)?{_POWER}))?(?P<raised>[⁺⁻]?[⁰¹²³⁴-⁹]+)?",
    re.ASCII,
)
_FORMULA = re.compile(r"\\[dtc]?frac|\\sqrt|\\pi\b|\^")


async def final_number(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[RewardResult]:
    """Returns 1.0 if the numbers are equal as exact fractions, otherwise 0.0: ``0.5``, ``1/2``, ``½``, ``.50``,
    ``5e-1`` and ``$0.50`` are equal.

    Ignores units (``%`` and ``$``) and commas between thousands. Raises RewardError if the answer holds no number.
    """
    wanted = last_number(prompt.answer.rsplit("####", 1)[-1])
    if wanted is None:
        raise RewardError(f"prompt {prompt.id!r}: its answer {prompt.answer!r:.80} holds no number to compare with")
    return await run_in_daemon_thread(lambda: [_judged(last_number(text), wanted) for text in texts])


def _judged(number: Fraction | None, wanted: Fraction) -> RewardResult:
    return RewardResult(total=float(number == wanted), answer="" if number is None else str(number))


def is_formula(answer: str) -> bool:
    """True if the answer itself, after ``####`` or in ``\\boxed``, is a formula in LaTeX. The last number is then only
    a part of it: 2 of ``\\frac{1}{2}``."""
    return _FORMULA.search(to_latex(answer).rsplit("####", 1)[-1].rsplit("\\boxed", 1)[-1]) is not None


def last_number(text: str) -> Fraction | None:
    """Returns the last number in ``text``; None if there is none, if it is under a root sign, or if it has more than
    ``MAX_DIGITS`` digits."""
    text, last = remove_reasons(to_ascii(text)), None
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
        power = read_digits(last["raised"][:5])
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if abs(power) * bits > 3 * MAX_DIGITS or (power < 0 and value == 0):
            return None
        value **= power
    negative = (last["sign"] or last["inner"] or "+") != "+"
    return -value if negative else value


LIMIT_SECONDS = 3.0  # processor time for one completion; most patterns take microseconds, math-verify 0.02 for 100 kB


class FormatReward:
    """The reward 1.0 if ``pattern`` matches a text from its first character to its last, otherwise 0.0, also for a text
    that takes 3 s of a processor.

    Another process matches, because a pattern that backtracks holds Python's lock until it ends.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern, self._process = pattern, BoundedProcess("rl_megatron.rewards.format_worker")

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[RewardResult]:
        """Returns 1.0 or 0.0 for each text. Raises RewardError if the process does not start, is killed or hangs."""
        return await run_in_daemon_thread(lambda: [RewardResult(total=float(self._matches(text))) for text in texts])

    def _matches(self, text: str) -> bool:
        try:
            return bool(self._process.ask(LIMIT_SECONDS, self._pattern, text))
        except LimitExceeded:
            return False
        except ProcessFailed as error:
            raise RewardError(f"format: {error}") from error


def format_reward(section: RewardSection) -> FormatReward:
    """Returns the reward of ``reward.format``. Raises ConfigError if it has no pattern."""
    if section.format.pattern is None:
        raise ConfigError(
            "the reward function format needs reward.format.pattern, a regular expression for the whole completion, "
            r"for example reward.format.pattern='(?s)<think>.*</think>\s*\S.*'"
        )
    return FormatReward(section.format.pattern)


class LengthReward:
    """The reward 1.0 from ``min_tokens`` to ``max_tokens``, 0.0 outside.

    The stop token counts, as in the metric response/length_mean.
    """

    def __init__(self, section: LengthSection) -> None:
        self._section = section

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[RewardResult]:
        """Returns a reward for each completion, only from its number of tokens."""
        return [RewardResult(total=self._of(len(completion.token_ids))) for completion in completions]

    def _of(self, tokens: int) -> float:
        least, most = self._section.min_tokens, self._section.max_tokens
        return float(least <= tokens and (most is None or tokens <= most))


def length_reward(section: RewardSection) -> LengthReward:
    """Returns the reward of ``reward.length``. Raises ConfigError if it prefers no length."""
    if section.length.max_tokens is None and section.length.min_tokens == 0:
        raise ConfigError(
            "the reward function length gives every completion 1; set reward.length.max_tokens or "
            "reward.length.min_tokens"
        )
    return LengthReward(section.length)


_PROCESSES = min(4, len(os.sched_getaffinity(0)))


async def math_verify(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[RewardResult]:
    """Returns 1.0 if math-verify finds the two equal, otherwise 0.0, also for a text that it cannot parse, or not in
    3 s of a processor.

    The answer may be a number, LaTeX with or without its dollars, or GSM8K's (the part after ``####``).
    Raises RewardError for an answer that is not an expression, ConfigError if the library is missing.
    """
    answer = prompt.answer.rsplit("####", 1)[-1].strip()
    with paused_while_queued() as begun:
        if not (await _compare_in_process(answer, None)).get("known"):
            raise RewardError(f"prompt {prompt.id!r}: math-verify finds no expression in its answer {answer!r:.80}")
        told = await asyncio.gather(*(_compare_in_process(answer, text, begun) for text in texts))
    return [RewardResult(total=one.get("total", 0.0), answer=one.get("answer", "")) for one in told]


async def _compare_in_process(
    answer: str, text: str | None, on_start: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Returns the reply of the first process that is free; empty if the comparison exceeded its limit."""
    loop = asyncio.get_running_loop()

    def ask() -> dict[str, Any]:
        if on_start is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(on_start)
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
