"""A run's loop, which every job shares: steps, evaluations, rows of metrics, checkpoints, stops."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rl_megatron.errors import Stopped
from rl_megatron.interfaces import Learner
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.training.checkpoints import Checkpoint, CheckpointStore, TrainerState
from rl_megatron.training.stopping import unless_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When what is done, in steps. Beside multiples of a number the last step counts; 0 is the last step alone."""

    steps: int
    rows: int  # of metrics
    evaluations: int
    checkpoints: int | None  # None: where a stop comes, and nowhere else


class Job(Protocol):
    """What a run does in each step. The controller's process."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def first_step_is_saved(self) -> bool:
        """Whether what ``start`` works on lies in no checkpoint yet, so that one is written behind it."""
        ...

    async def start(self, *, fresh: bool) -> Row | None:
        """Before the first step; after ``restore`` where this is not a ``fresh`` start. The row of step 0, if any."""
        ...

    async def step(self, number: int, watch: Stopwatch) -> Row:
        """Make a step; its metrics."""
        ...

    async def evaluate(self, watch: Stopwatch) -> Row:
        """Metrics of the weights as they are, on held-out data."""
        ...

    def enough(self, row: Row) -> bool:
        """Whether the job ends with the step of this row, though more were allowed."""
        ...

    def state(self) -> TrainerState:
        """What a checkpoint of this moment holds beside the learners' shards."""
        ...

    def learners(self) -> Mapping[str, Learner]:
        """Whose shards it holds, by the folder that they lie in."""
        ...

    async def restore(self, state: TrainerState) -> None:
        """Continue from ``state``, once the learners have."""
        ...


@dataclass(slots=True, kw_only=True)
class Loop:
    """One job's steps. ``stop`` set (Ctrl-C, SIGTERM) ends it after the step in hand, with a checkpoint."""

    job: Job
    pace: Pace
    checkpoints: CheckpointStore
    recorder: Recorder
    stop: asyncio.Event
    done: int = 0  # steps
    saved: int | None = None  # the step that a resume goes on from; None before the first

    async def run(self) -> bool:
        """Make all steps; whether the job came to its end before a stop. Where it did not, a checkpoint was written.

        Raises Stopped where a stop is asked before the first step.
        """
        await self._start()
        watch, ended = Stopwatch(), self.done >= self.pace.steps
        while not ended and not self.stop.is_set():
            self.done += 1
            row = await self.job.step(self.done, watch)
            if self._due(self.pace.evaluations):
                row |= await self.job.evaluate(watch)
            if self._due(self.pace.rows):
                self.recorder.write(row | watch.row())  # before the checkpoint: a resume keeps rows up to its step
                watch = Stopwatch()
            if self.pace.checkpoints is not None and self._due(self.pace.checkpoints):
                with watch("checkpoint"):
                    await self.save()
            ended = self.done >= self.pace.steps or self.job.enough(row)
        if not ended and self.saved != self.done:
            await self.save()
        return ended

    async def _start(self) -> None:
        fresh = self.saved is None
        if fresh and self.job.first_step_is_saved:  # what a stop would lose lies in no checkpoint yet
            await self._first_row(fresh=True)
            await self.save()
        else:
            await unless_stopped(self.stop, self._first_row(fresh=fresh))
            self.saved = self.done if fresh else self.saved
        if self.stop.is_set():
            raise Stopped(f"stopped before the first step ({self.job.name})")

    async def _first_row(self, *, fresh: bool) -> None:
        row = await self.job.start(fresh=fresh)
        if row is not None:
            self.recorder.write(row)

    def _due(self, every: int) -> bool:
        return self.done == self.pace.steps or (every > 0 and self.done % every == 0)

    async def save(self) -> None:
        """A checkpoint of this moment."""
        await self.checkpoints.save(self.job.state(), self.job.learners())
        self.saved = self.done

    async def restore(self, checkpoint: Checkpoint, done: int) -> None:
        """Continue behind step ``done``, from a checkpoint of it."""
        await checkpoint.load(self.job.learners())
        await self.job.restore(checkpoint.state)
        self.done = self.saved = done
