"""Products with a calculator: ``37*45=``; the model may write ``?37*45``, reads ``:1665``, and answers ``!1665``."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence

from rl_megatron.environments.protocol import EnvironmentStep, Observed, Reply, Transcript
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

    async def start(self, task: Prompt, seed: int) -> Observed:
        """The product to find."""
        self._answer = task.answer
        return Observed(said=task.messages or task.text)

    async def step(self, reply: Reply) -> EnvironmentStep:
        """Compute what follows ``?``; anything else ends the trajectory."""
        if not reply.text.startswith("?"):
            return EnvironmentStep(reward=float(reply.text == f"!{self._answer}"))
        try:
            said, failed = f":{evaluated(reply.text[1:])}", 0.0
        except ValueError as error:
            said, failed = f":{error}", 1.0
        return EnvironmentStep(
            observation=Observed(said=said), metrics={"calculations": 1.0, "failed_calculations": failed}
        )

    async def score(self, transcript: Transcript) -> float:
        """Of a trajectory that gave no answer: 0."""
        return 0.0

    async def close(self) -> None:
        """There is nothing to release."""

    def demonstration(self, task: Prompt, seed: int) -> Sequence[str]:
        """The answer at once, or after a calculation."""
        if random.Random(seed).random() >= self._demonstrated:
            return (f"!{task.answer}",)
        return f"?{task.text.rstrip('=')}", f":{task.answer}", f"!{task.answer}"


def evaluated(text: str) -> int:
    """The value of sums, differences and products of whole numbers; leading zeros count for nothing.

    Raises ValueError, whose short text is for the model, for anything else and for values of more than 18 digits.
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
