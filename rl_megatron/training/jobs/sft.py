"""Supervised fine-tuning (``job=sft``): cross-entropy on answers and conversations that somebody wrote."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rl_megatron.config.run import RunConfig
from rl_megatron.data.problems.mixture import MixtureState
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.samples import WrittenRow, written_samples
from rl_megatron.errors import DataError
from rl_megatron.interfaces import Learner, Roles
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.jobs.supervised import HeldOutLoss, SupervisedSteps
from rl_megatron.training.measures import policy_row
from rl_megatron.training.schedule import learning_rate
from rl_megatron.types import Prompt, Samples

WrittenRows = Callable[[Sequence[Prompt]], list[WrittenRow]]
"""The rows of prompts, in their order; of each one or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Rows of at most so many tokens, and how many were left out and cut for that."""

    rows: Sequence[WrittenRow]
    dropped: int
    cut: int


def fitted(rows: Sequence[WrittenRow], most: int, on_long: Literal["fail", "drop", "cut"]) -> Fitted:
    """Rows of at most ``most`` tokens. Raises DataError that names the first longer one where ``on_long`` is fail."""
    kept, cut = list[WrittenRow](), 0
    for row in rows:
        if len(row.token_ids) <= most:
            kept.append(row)
            continue
        if on_long == "fail":
            raise DataError(
                f"prompt {row.id!r} has {len(row.token_ids)} tokens with its answers, sft.max_tokens={most}; raise it, "
                "or set sft.on_long=drop or cut"
            )
        turns = tuple((start, min(stop, most)) for start, stop in row.turns if start < most)
        if on_long == "cut" and turns:
            kept.append(WrittenRow(id=row.id, token_ids=np.array(row.token_ids[: turns[-1][1]]), turns=turns))
            cut += 1
    return Fitted(rows=kept, dropped=len(rows) - len(kept), cut=cut)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The prompts of a step, being made into rows, and the place in the data before them."""

    before: dict[str, int] | MixtureState
    prompts: list[Prompt]
    rows: Future[Fitted]


@dataclass(slots=True, kw_only=True)
class FineTuning:
    """A Job of ``training.loop``: an optimizer step on each ``sft.batch_size`` rows of the data. The rows of the next
    step are made while this one trains."""

    config: RunConfig
    roles: Roles
    prompts: PromptStream
    size: int  # of the data, in rows
    rows_of: WrittenRows
    supervised: SupervisedSteps
    held_out: HeldOutLoss
    name: str = "fine-tuning"
    first_step_is_saved: bool = False
    number: int = 0  # of the last step
    _next: _Drawn | None = None
    _maker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rows"))

    async def start(self, *, fresh: bool) -> Row | None:
        """Read ahead, and measure the loss of the model that training starts from."""
        await asyncio.to_thread(self.prompts.read_ahead)
        return {**self._row(), **await self.held_out.row()} if fresh else None

    async def step(self, number: int, watch: Stopwatch) -> Row:
        """Make an optimizer step; without a row that fits, none is made. Its loss is missing if it was skipped."""
        drawn, self.number = self._next or self._draw(), number
        began = time.perf_counter()
        found = await asyncio.wrap_future(drawn.rows)
        watch.note("sft/data_seconds", time.perf_counter() - began)
        self._next = self._draw() if number < self.config.train.steps else None
        rate = learning_rate(self.config, number)
        row: Row = {**self._row(), "learning_rate": rate, "tokens/train": 0}
        row |= {"sft/dropped": found.dropped, "sft/cut": found.cut}
        row["sft/epoch"] = number * self.config.sft.batch_size / self.size
        if found.rows:
            samples = written_samples(found.rows)
            with watch("train"):
                made = await self.supervised.step(samples, rate, drawn.prompts)
            row |= {"tokens/train": len(samples.input_ids), "sft/tokens": int(samples.mask.sum())}
            watch.count("train", len(samples.input_ids))
            row |= policy_row([] if made is None else [made])
        return {**row, **self.roles.rank_metrics()}

    def _draw(self) -> _Drawn:
        before, section = self.prompts.state(), self.config.sft
        prompts = self.prompts.take(section.batch_size)
        rows = self._maker.submit(lambda: fitted(self.rows_of(prompts), section.max_tokens, section.on_long))
        return _Drawn(before, prompts, rows)

    def _row(self) -> Row:
        return {"step": self.number, "phase": "sft"}

    async def evaluate(self, watch: Stopwatch) -> Row:
        """The loss on held-out rows, timed as ``eval``."""
        with watch("eval"):
            return await self.held_out.row()

    def enough(self, row: Row) -> bool:
        """Always False: the job makes all its steps."""
        return False

    def learners(self) -> dict[str, Learner]:
        """The policy alone, keyed by its subfolder of a checkpoint."""
        return {"learner": self.roles.policy}

    async def before_save(self) -> None:
        """What is drawn ahead is drawn again by a resume."""

    def state(self) -> TrainerState:
        """The position in the data behind the last step."""
        prompts = self.prompts.state() if self._next is None else self._next.before
        return TrainerState(step=self.number, prompts=prompts, stream=None)

    async def restore(self, state: TrainerState) -> None:
        """Continue from ``state``."""
        self.number = state.step
        await asyncio.to_thread(self.prompts.digest)
        self.prompts.restore(state.prompts)

    async def close(self) -> None:
        """End the making of rows."""
        self._maker.shutdown(wait=False, cancel_futures=True)


def held_out_parts(prompts: Sequence[Prompt], rows_of: WrittenRows, config: RunConfig) -> list[Samples]:
    """Held-out rows that fit, in parts of ``sft.batch_size`` prompts. Raises DataError if none does."""
    section, parts = config.sft, list[Samples]()
    for start in range(0, len(prompts), section.batch_size):
        found = fitted(rows_of(prompts[start : start + section.batch_size]), section.max_tokens, section.on_long)
        if found.rows:
            parts.append(written_samples(found.rows))
    if not parts:
        raise DataError(f"all {len(prompts)} held-out rows have more tokens than sft.max_tokens={section.max_tokens}")
    return parts
