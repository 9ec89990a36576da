"""One row a prompt: how often it was trained on or had equal rewards, its pass rate, and its value, SPO's baseline.

It says which prompts are drawn.

It is updated at the end of a step, in the order in which prompts were drawn, so that it is a function of the steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_megatron.columns import Rates, Retired, Visits
from rl_megatron.config.sections.data import CurriculumSection
from rl_megatron.data.problems.pool import Pool
from rl_megatron.errors import CheckpointError

logger = logging.getLogger(__name__)

_PRIOR = 0.5, 1.0  # a value, and of how many completions: Beta(1/2, 1/2)
_MIN_LEFT = 0.1  # of a source's prompts: where fewer would be drawn, retired ones are drawn again
_MOST_SPREAD = 0.5  # of a reward of 0 or 1, at a pass rate of a half


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """A table between two steps, for checkpoints; a number for each prompt."""

    visits: Visits
    rates: Rates  # NaN: unknown
    retired: Retired  # the step; -1: it is drawn
    values: Rates | None = None  # where they are tracked
    counts: Rates | None = None  # of completions that still count


class PromptTable:
    """``prompts`` with their pass rates; ``sources`` has the rows of each source."""

    def __init__(
        self,
        prompts: Pool,
        sources: Mapping[str, NDArray[np.integer]],
        section: CurriculumSection,
        *,
        seed: int,
        track_decay: float | None = None,
    ) -> None:
        """``track_decay``: of the values (`track`); None: these are not tracked."""
        self._section, self._seed, self._track_decay = section, seed, track_decay
        self._sources, self._prompts = sources, prompts
        self.visits = np.zeros(len(prompts), np.int32)
        self.rates = np.full(len(prompts), np.nan)
        self.retired = np.full(len(prompts), -1, np.int32)
        self._again = Counter[str]()  # retired prompts of each source that were drawn again, by this process
        value, count = _PRIOR
        self.values, self.counts = np.full(len(prompts), value), np.full(len(prompts), count)

    def draws(self, row: int, epoch: int) -> bool:
        """Whether this epoch draws the prompt. Any thread may ask."""
        s, rate = self._section, self.rates[row]
        drawn = self.retired[row] < 0
        known = self.visits[row] >= s.min_seen
        if drawn and known and s.explore is not None and not np.isnan(rate):
            share = (np.sqrt(rate * (1 - rate)) + s.explore) / (_MOST_SPREAD + s.explore)
            drawn = np.random.default_rng([self._seed, epoch, row, 2]).random() < share
        return bool(drawn)

    def update(self, seen: Iterable[tuple[str, float]], step: int, left_out: Set[int]) -> None:
        """Add the share of right completions of each prompt that ``step`` ended, by its id and in the order drawn.

        ``left_out``: rows that are not drawn for another reason.
        """
        s = self._section
        for name, share in seen:
            row = self._prompts.row_of(name)
            before = share if np.isnan(self.rates[row]) else self.rates[row]
            self.rates[row] = s.decay * before + (1 - s.decay) * share
            self.visits[row] += 1
            if s.retire_above is not None and self.visits[row] >= s.min_seen and self.rates[row] >= s.retire_above:
                self.retired[row] = step
        self.keep_enough(left_out)

    def track(self, seen: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Add the rewards of completions of each prompt, by its id and in the order drawn, to its value.

        The mean of the posterior of SPO's value tracker (arXiv:2509.13232): alpha' = decay alpha + sum of r and
        beta' = decay beta + sum of 1 - r, with alpha / (alpha + beta) the value and alpha + beta the count.
        """
        if self._track_decay is None:
            return
        for name, rewards in seen:
            row = self._prompts.row_of(name)
            kept = self._track_decay * self.counts[row]
            self.counts[row] = kept + len(rewards)
            self.values[row] = (kept * self.values[row] + sum(rewards)) / self.counts[row]

    def value_of(self, name: str) -> float:
        """The value of the prompt, from its completions of earlier steps."""
        return float(self.values[self._prompts.row_of(name)])

    def keep_enough(self, left_out: Set[int]) -> None:
        """Where less than a tenth of a source is drawn, draw its retired prompts again, those first that retired
        first; each must be seen ``min_seen`` times before it can retire again. A warning says so whenever twice as many
        were: of a policy that solves nearly all it happens at each step."""
        gone = np.zeros(len(self.retired), np.bool_)
        gone[list(left_out)] = True
        for name, rows in self._sources.items():
            retired = rows[(self.retired[rows] >= 0) & ~gone[rows]]
            drawn = int((~gone[rows]).sum()) - len(retired)
            missing = min(len(retired), int(np.ceil(_MIN_LEFT * len(rows))) - drawn)
            if missing <= 0:
                continue
            back = retired[np.argsort(self.retired[retired], kind="stable")][:missing]
            self.retired[back], self.visits[back] = -1, 0
            before = self._again[name]
            self._again[name] += len(back)
            if self._again[name].bit_length() > before.bit_length():
                of = f" of source {name!r}" if name else ""
                logger.warning(
                    "%d of %d prompts%s are left: %d that had retired are drawn again, %d so far",
                    *(drawn, len(rows), of, len(back), self._again[name]),
                )

    def row(self) -> dict[str, float]:
        """The metrics ``curriculum/…``."""
        known = self.rates[~np.isnan(self.rates)]
        mean = {"curriculum/mean_pass_rate": float(known.mean())} if len(known) else {}
        return {"curriculum/retired": int((self.retired >= 0).sum()), **mean}

    def state(self) -> TableState:
        """What ``restore`` continues from."""
        columns = {"visits": self.visits.copy(), "rates": self.rates.copy(), "retired": self.retired.copy()}
        if self._track_decay is not None:
            columns |= {"values": self.values.copy(), "counts": self.counts.copy()}
        return TableState(**columns)

    def restore(self, state: TableState | None) -> None:
        """Continue from ``state``. Raises CheckpointError if it is of other data."""
        found = 0 if state is None else len(state.visits)
        if state is None or found != len(self.visits):
            raise CheckpointError(
                f"the checkpoint has pass rates of {found} prompts, but data.curriculum needs {len(self.visits)}; "
                "resume with the same data and limits"
            )
        self.visits, self.rates, self.retired = state.visits.copy(), state.rates.copy(), state.retired.copy()
        if state.values is not None and state.counts is not None:
            self.values, self.counts = state.values.copy(), state.counts.copy()
