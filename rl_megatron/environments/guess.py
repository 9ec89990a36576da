"""A hidden number: the model reads ``?``, guesses ``7``, reads ``<`` if the number is smaller or ``>`` if it is larger,
and guesses again. Which number it is depends on the task's id alone, so any data will do."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal, get_args

from rl_megatron.environments.protocol import EnvironmentStep, Observed, Reply, Transcript
from rl_megatron.seeds import text_seed
from rl_megatron.types import Prompt

Rewarded = Literal["bits", "found"]
_PARTS = 2**20  # rewards of turns are whole numbers of these, so that sums of them are exact
_WRONG = "!"  # what follows a text that is no number of the range


class Guess:
    """A trajectory that finds the number gets 1. ``rewarded``: what turns get.

    bits: the share that a guess settled of what was unknown at first, log2 of ``numbers``, and one bit for saying it;
    the sum is 1 exactly where the number is found. found: 1 for the guess that finds it, and 0 for others.
    """

    def __init__(self, numbers: int = 16, rewarded: Rewarded = "bits") -> None:
        if not 2 <= numbers <= 10**6:
            raise ValueError(f"numbers={numbers!r} is how many there are; give 2 to 1000000")
        if rewarded not in get_args(Rewarded):
            raise ValueError(f"rewarded={rewarded!r}; give {' or '.join(get_args(Rewarded))}")
        self._numbers, self._rewarded = numbers, rewarded
        self._hidden = self._first = 0
        self._behind_last = numbers  # those that hints leave are from `_first` to before this
        self._given = 0.0

    async def start(self, task: Prompt, seed: int) -> Observed:
        """Hide the number."""
        self._hidden = _hidden(task, self._numbers)
        return Observed(said="?")

    async def step(self, reply: Reply) -> EnvironmentStep:
        """Say on which side of the guess the number is; the number itself ends the trajectory."""
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
        return EnvironmentStep(observation=Observed(said=hint), reward=reward, metrics=metrics)

    async def score(self, transcript: Transcript) -> float:
        """Of a trajectory without a guess: 0."""
        return 0.0

    async def close(self) -> None:
        """There is nothing to release."""

    def demonstration(self, task: Prompt, seed: int) -> Sequence[str]:
        """Guesses drawn without a look at the hints, up to four: how to write, and not how to search. They stand after
        the task's text, and a trajectory's after ``?``."""
        hidden, draws, texts = _hidden(task, self._numbers), random.Random(seed), list[str]()
        for _ in range(4):
            guess = draws.randrange(self._numbers)
            texts += [str(guess), ">" if guess < hidden else "<"]
            if guess == hidden:
                break
        return texts[:-1]


def _hidden(task: Prompt, numbers: int) -> int:
    return text_seed(f"guess {task.id}") % numbers
