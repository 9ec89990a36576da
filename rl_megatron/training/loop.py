"""The loop that every job runs in: it makes steps, evaluates, writes metrics and checkpoints, and handles stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rl_megatron.errors import RLMegatronError, StopRequested, WorkerFailure, wait_or_stop
from rl_megatron.interfaces import Learner, WeightSync
from rl_megatron.observability.files import JsonValue
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.training.checkpoints import Checkpoint, CheckpointStore, PendingCheckpoint, SavedShards, TrainerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Intervals, in steps, between rows of metrics, evaluations and checkpoints.

    The last step always counts, and with an interval of 0 it alone does.
    """

    steps: int
    metrics: int  # steps between rows of metrics
    evaluations: int
    checkpoints: int | None  # None: only when a stop is requested
    sets_due: Callable[[int], bool] | None = None  # true if a set with its own steps is due after a step


class Job(Protocol):
    """Defines the work of one training step. Runs in the controller process."""

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    @property
    def first_step_is_saved(self) -> bool:
        """True if no checkpoint yet holds the weights at ``start``, so that the loop writes one after it."""
        ...

    async def start(self, *, fresh: bool) -> Row | None:
        """Prepares the first step. Called after ``restore`` unless the start is ``fresh``. Returns the row of step 0,
        which gets the figures of ``evaluate``."""
        ...

    async def step(self, number: int, watch: Stopwatch) -> Row:
        """Makes step ``number``. Returns its metrics."""
        ...

    async def evaluate(self, watch: Stopwatch) -> Row:
        """Returns metrics of the present weights on held-out data. A stop cancels it."""
        ...

    def should_stop(self, row: Row) -> bool:
        """True if the job ends early, with the step of this row."""
        ...

    async def flush(self, stop: asyncio.Event) -> None:
        """Makes ``state`` include all pending work. Called right before it. Waits for no evaluation once ``stop`` is
        set."""
        ...

    def state(self) -> TrainerState:
        """Returns the controller's state that a checkpoint holds with the learners' shards."""
        ...

    def learners(self) -> Mapping[str, Learner]:
        """Returns the learners with shards in a checkpoint, keyed by subfolder."""
        ...

    async def restore(self, state: TrainerState) -> None:
        """Continues from ``state``. Called after the learners have loaded their shards."""
        ...

    async def close(self) -> None:
        """Ends work that continues between steps. Called once, however the loop ends."""
        ...


def _not_profiled(step: int) -> AbstractAsyncContextManager[None]:
    return nullcontext()


@dataclass(slots=True, kw_only=True)
class Loop:
    """Runs one job. Setting ``stop`` (Ctrl-C, SIGTERM) ends it after the current step, with a checkpoint.

    Time may then be short, so an evaluation is put off until the resume, but for the last step's.
    """

    job: Job
    pace: Intervals
    checkpoints: CheckpointStore
    recorder: Recorder
    stop: asyncio.Event
    profiled: Callable[[int], AbstractAsyncContextManager[None]] = _not_profiled  # while a step's work is done
    async_save: bool = True  # steps continue while a checkpoint is written
    steps_done: int = 0  # steps
    last_saved: int | None = None  # the step of the newest checkpoint, which may be in hand; None before the first
    pending_save: PendingCheckpoint | None = None
    postponed_row: Row | None = None  # the row of step ``steps_done``, where a stop put off its evaluation
    resumed_from: Path | None = None  # the checkpoint

    async def run(self) -> bool:
        """Makes all steps. Returns False if a stop ended the job early; a checkpoint is then written.

        Raises StopRequested if a stop is requested before the first step. An error that is not the ranks' own leaves
        the checkpoint in hand too, whole, as does a cancellation of this task alone."""
        try:
            return await self._run()
        except (Exception, asyncio.CancelledError) as error:
            await self._complete_pending_save(error)
            raise
        finally:
            if self.pending_save is not None:
                await self.pending_save.wait()
            await self.job.close()

    async def _run(self) -> bool:
        ended = await self._start()
        watch = Stopwatch()
        while not ended and not self.stop.is_set():
            self.steps_done += 1
            async with self.profiled(self.steps_done):
                row = await self.job.step(self.steps_done, watch)
            self._poll_save(watch)
            measured: Row | None = {}
            if self._due(self.pace.evaluations) or (
                self.pace.sets_due is not None and self.pace.sets_due(self.steps_done)
            ):
                measured = await self._evaluated(watch)
                row |= measured or {}
            if self._due(self.pace.metrics):
                # The row precedes the checkpoint, because a resume keeps rows up to its step.
                written, watch = await self.recorder.write(row | watch.row()), Stopwatch()
                self.postponed_row = written if measured is None else None
            if self.pace.checkpoints is not None and self._due(self.pace.checkpoints):
                await self.save(watch, row.get("eval/accuracy"))
            ended = self.steps_done >= self.pace.steps or self.job.should_stop(row)
        if not ended and self.last_saved != self.steps_done:
            await self.save(watch)
        await self._finish_save(watch)
        return ended

    async def _start(self) -> bool:
        """Returns whether no step is left."""
        fresh, watch, enough = self.last_saved is None, Stopwatch(), False
        await asyncio.to_thread(self.checkpoints.claimed)  # the job may write the model that it starts from
        if fresh and self.job.first_step_is_saved:  # else a stop would lose weights that no checkpoint holds
            row = await self.job.start(fresh=True)
            if row is not None:
                measured = await self._evaluated(watch)
                row |= measured or {}
                written = await self.recorder.write(row)
                self.postponed_row = written if measured is None else None
            await self.save(watch, (row or {}).get("eval/accuracy"))
            await self._finish_save(watch)  # else a failure of the first steps would lose them, too
        elif fresh:
            enough = await wait_or_stop(self.stop, self._first_row(watch))
            self.last_saved = self.steps_done
        else:
            enough = await wait_or_stop(self.stop, self._run_postponed_eval())
        if self.stop.is_set():
            raise StopRequested(f"stopped before the first step ({self.job.name})")
        return enough or self.steps_done >= self.pace.steps

    async def _first_row(self, watch: Stopwatch) -> bool:
        """True if the job has reached its goal before its first step."""
        row = await self.job.start(fresh=True)
        if row is None:
            return False
        row |= await self.job.evaluate(watch)
        await self.recorder.write(row)
        return self.job.should_stop(row)

    async def _run_postponed_eval(self) -> bool:
        """Begins a resume, with the evaluation that the stop put off. Returns whether the job ends with that step."""
        await self.job.start(fresh=False)
        row, self.postponed_row = self.postponed_row, None
        if row is None:
            return False
        watch = Stopwatch()
        row |= await self.job.evaluate(watch)
        if isinstance(before := row.get("seconds/step"), float):  # else the row of step 0, which has no times
            row |= (times := watch.row()) | {"seconds/step": before + times["seconds/step"]}
        await self.recorder.write(row, again=True)  # written without it before, as this resume may be stopped, too
        accuracy = row.get("eval/accuracy")
        if isinstance(accuracy, float) and self.resumed_from is not None and self.pace.checkpoints is not None:
            await asyncio.to_thread(self.checkpoints.note_accuracy, self.resumed_from, accuracy)
        return self.job.should_stop(row)

    async def _evaluated(self, watch: Stopwatch) -> Row | None:
        """Returns figures of the present weights; None if a stop puts them off, never for the last step."""
        if self.steps_done == self.pace.steps:
            return await self.job.evaluate(watch)
        if self.stop.is_set():
            return None
        try:
            return await wait_or_stop(self.stop, self.job.evaluate(watch))
        except StopRequested:
            return None

    def _due(self, every: int) -> bool:
        return self.steps_done == self.pace.steps or (every > 0 and self.steps_done % every == 0)

    async def save(self, watch: Stopwatch, accuracy: JsonValue = None) -> None:
        """Begins a checkpoint of the present state, after the one in hand; without ``async_save`` also finishes it.

        ``accuracy``: the held-out one, where this step measured it.
        """
        await self._finish_save(watch)
        with watch("checkpoint"):
            await self.job.flush(self.stop)
            known, state = accuracy if isinstance(accuracy, float) else None, self.job.state()
            if self.postponed_row is not None:
                state = replace(state, row=self.postponed_row)
            self.pending_save = await self.checkpoints.save(state, self.job.learners(), known)
        self.last_saved = self.steps_done
        if not self.async_save:
            await self._finish_save(watch)

    async def export(self, weights: WeightSync, folder: Path) -> None:
        """Writes the version pushed last into ``folder`` of the run's. Raises CheckpointError where that is another."""
        await asyncio.to_thread(self.checkpoints.claimed)
        await weights.export(folder)

    def _poll_save(self, watch: Stopwatch) -> None:
        """Notes the checkpoint in hand if it has its name. Raises what its ranks or threads raised."""
        if self.pending_save is not None and (saved := self.pending_save.saved) is not None:
            self._record_save(watch, saved)

    async def _finish_save(self, watch: Stopwatch) -> None:
        if self.pending_save is not None:
            with watch("checkpoint"):
                saved = await self.pending_save.finish()
            self._record_save(watch, saved)

    def _record_save(self, watch: Stopwatch, saved: SavedShards) -> None:
        watch.note("checkpoint/bytes", saved.num_bytes)
        watch.note("checkpoint/write_seconds", saved.write_seconds)
        watch.note("checkpoint/step", self.last_saved or 0)
        self.pending_save = None

    async def _complete_pending_save(self, error: BaseException) -> None:
        """Finishes the checkpoint in hand, although ``error`` ends the run, unless a rank that writes it failed."""
        if self.pending_save is None or isinstance(error, WorkerFailure):
            return
        if self.pending_save.is_running:
            what = type(error).__name__
            logger.info("the run fails (%s: %s); its checkpoint in hand is finished first", what, error)
        try:
            await self._finish_save(Stopwatch())
        except Exception as second:
            if second is not error:
                first, what = f"{type(error).__name__}: {error}", type(second).__name__
                ours = not isinstance(second, (RLMegatronError, OSError))
                said = "the run fails (%s); besides, %s is not finished: %s: %s"
                logger.error(said, first, self.pending_save.folder, what, second, exc_info=ours)

    async def restore(self, checkpoint: Checkpoint, done: int) -> None:
        """Continues after step ``steps_done``, from its checkpoint."""
        await checkpoint.load(self.job.learners())
        await self.job.restore(checkpoint.state)
        self.steps_done = self.last_saved = done
        self.postponed_row, self.resumed_from = checkpoint.state.row, checkpoint.folder
