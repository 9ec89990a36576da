"""Turns whose clients write the prompts as tokens: rows by exact prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rl_megatron.columns import TokenIds
from rl_megatron.data.trajectories import turn_at
from rl_megatron.types import Chain, Completion, Turn


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    tokens: TokenIds
    turns: tuple[Turn, ...]


class TokenRows:
    """A prompt that begins with a whole row goes on from it; another begins a row."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self.gone_on = 0  # turns that go on from an earlier one's row

    def add(self, prompt: TokenIds, completion: Completion, text: str) -> Turn | None:
        """Take what was sampled after the ``prompt``, [L] int32. The turn at its place; None if nothing was sampled."""
        if not len(completion.token_ids):
            return None
        turn = turn_at(len(prompt), completion, text)
        begun = [row for row in self._rows if np.array_equal(row.tokens, prompt[: len(row.tokens)])]
        row = max(begun, key=lambda one: len(one.tokens), default=None)
        if row is None:
            row = _Row(tokens=prompt, turns=())
            self._rows.append(row)
        else:
            self.gone_on += 1
        row.tokens, row.turns = np.concatenate((prompt, completion.token_ids)), (*row.turns, turn)
        return turn

    def rows(self) -> Iterator[TokenIds]:
        """The tokens of all rows so far."""
        return (row.tokens for row in self._rows)

    def chains(self) -> tuple[Chain, ...]:
        """The rows to train on; each turn is in one."""
        return tuple(Chain(token_ids=row.tokens, turns=row.turns) for row in self._rows)
