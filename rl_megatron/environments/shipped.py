"""The shipped environments: products with a calculator, and a hidden number.

Calculator: ``37*45=``; the model may write ``?37*45``, reads ``:1665``, and answers ``!1665``. Guess: the model reads
``?``, guesses ``7``, reads ``<`` if the number is smaller or ``>`` if it is larger, and guesses again. The number
depends only on the task's id, so any data will do.
"""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from rl_megatron.environments.protocol import EnvironmentStep, Observation, Reply, Transcript
from rl_megatron.seeds import text_seed
from rl_megatron.types import Prompt

_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MOST_CHARACTERS, _MOST_DIGITS = 64, 18
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")


class Calculator:
    """Right answers get 1, all others 0. ``demonstrated``: the share of warm-start texts that use the calculator."""

    def __init__(self, demonstrated: float = 0.35) -> None:
        if not 0 <= demonstrated <= 1:
            raise ValueError(f"demonstrated={demonstrated!r} is a share; give a number from 0 to 1")
        self._demonstrated = demonstrated
        self._answer = ""

    async def start(self, task: Prompt, seed: int) -> Observation:
        """Returns the product to find."""
        self._answer = task.answer
        return Observation(content=task.messages or task.text)

    async def step(self, reply: Reply) -> EnvironmentStep:
        """Computes the text after ``?``; any other text ends the trajectory."""
        if not reply.text.startswith("?"):
            return EnvironmentStep(reward=float(reply.text == f"!{self._answer}"))
        try:
            said, failed = f":{evaluated(reply.text[1:])}", 0.0
        except ValueError as error:
            said, failed = f":{error}", 1.0
        return EnvironmentStep(
            observation=Observation(content=said), metrics={"calculations": 1.0, "failed_calculations": failed}
        )

    async def score(self, transcript: Transcript) -> float:
        """Gives a trajectory without an answer 0."""
        return 0.0

    async def close(self) -> None:
        """There is nothing to release."""

    def demonstration(self, task: Prompt, seed: int) -> Sequence[str]:
        """Returns the answer, immediately or after a calculation."""
        if random.Random(seed).random() >= self._demonstrated:
            return (f"!{task.answer}",)
        return f"?{task.text.rstrip('=')}", f":{task.answer}", f"!{task.answer}"


def evaluated(text: str) -> int:
    """Returns the value of sums, differences and products of whole numbers; leading zeros are ignored.

    Raises ValueError, with a short text for the model, for anything else and for values of more than 18 digits.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError("long")
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("syntax") from error
    return _value(tree)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            value = number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("syntax")
    if abs(value) >= 10**_MOST_DIGITS:
        raise ValueError("large")
    return value


Rewarded = Literal["bits", "found"]
_PARTS = 2**20  # rewards of turns are whole numbers of these, so that sums of them are exact
_WRONG = "!"  # the hint after a text that is not a number of the range


class Guess:
    """A trajectory that finds the number gets 1. ``rewarded``: the rewards of turns.

    bits: the share that a guess settled of the initially unknown bits, log2 of ``numbers``, and one bit for naming it;
    the sum is 1 exactly if the number is found. found: 1 for the guess that finds it, and 0 for others.
    """

    def __init__(self, numbers: int = 16, rewarded: Rewarded = "bits") -> None:
        if not 2 <= numbers <= 10**6:
            raise ValueError(f"numbers={numbers!r} is how many there are; give 2 to 1000000")
        if rewarded not in get_args(Rewarded):
            raise ValueError(f"rewarded={rewarded!r}; give {' or '.join(get_args(Rewarded))}")
        self._numbers, self._rewarded = numbers, rewarded
        self._hidden = self._first = 0
        self._behind_last = numbers  # possible numbers after the hints are from `_first` to before this
        self._given = 0.0

    async def start(self, task: Prompt, seed: int) -> Observation:
        """Hides the number."""
        self._hidden = _hidden(task, self._numbers)
        return Observation(content="?")

    async def step(self, reply: Reply) -> EnvironmentStep:
        """Answers with the side of the guess on which the number is; the number itself ends the trajectory."""
        guess = int(reply.text) if reply.text.isascii() and reply.text.isdigit() and len(reply.text) < 8 else -1
        if not 0 <= guess < self._numbers:
            return self._answered(_WRONG, kept=False)
        kept = self._first <= guess < self._behind_last
        if guess == self._hidden:
            return EnvironmentStep(
                reward=1.0 - self._given, metrics={"guesses": 1.0, "kept": float(kept), "found": 1.0}
            )
        before = self._behind_last - self._first
        if guess < self._hidden:
            self._first = max(self._first, guess + 1)
        else:
            self._behind_last = min(self._behind_last, guess)
        share = math.log2(before / (self._behind_last - self._first)) / (1 + math.log2(self._numbers))
        settled = round(share * _PARTS) / _PARTS
        return self._answered(">" if guess < self._hidden else "<", kept=kept, settled=settled)

    def _answered(self, hint: str, *, kept: bool, settled: float = 0.0) -> EnvironmentStep:
        reward = settled if self._rewarded == "bits" else 0.0
        self._given += reward
        metrics = {"guesses": 1.0, "kept": float(kept), "found": 0.0}
        return EnvironmentStep(observation=Observation(content=hint), reward=reward, metrics=metrics)

    async def score(self, transcript: Transcript) -> float:
        """Gives a trajectory without a guess 0."""
        return 0.0

    async def close(self) -> None:
        """There is nothing to release."""

    def demonstration(self, task: Prompt, seed: int) -> Sequence[str]:
        """Returns up to four guesses drawn without regard to the hints: they show the form, and not how to search. They
        follow the task's text, and a trajectory's guesses follow ``?``."""
        hidden, draws, texts = _hidden(task, self._numbers), random.Random(seed), list[str]()
        for _ in range(4):
            guess = draws.randrange(self._numbers)
            texts += [str(guess), ">" if guess < hidden else "<"]
            if guess == hidden:
                break
        return texts[:-1]


def _hidden(task: Prompt, numbers: int) -> int:
    return text_seed(f"guess {task.id}") % numbers
