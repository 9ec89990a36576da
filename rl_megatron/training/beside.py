"""Evaluates a version of the weights on the servers that sample for training, while later steps train."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from time import perf_counter

from rl_megatron.errors import Stopped
from rl_megatron.observability.recorder import Recorder
from rl_megatron.rollout.beside_training import BesideTraining
from rl_megatron.training.evaluation import Evaluation
from rl_megatron.training.tasks import unless_stopped

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EvaluationBeside:
    """One evaluation at a time; its row of metrics, of phase ``eval``, is written when it ends.

    Engines with priorities take its requests after those of training.
    """

    evaluation: Evaluation
    recorder: Recorder
    at_once: int | None = None  # the most requests that servers have at once; None: all
    step: int = 0  # of the last one that began
    skipped: int = 0  # evaluations that were due while one was under way, since the last row
    _measures: Evaluation = field(init=False)
    _running: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        given = self.evaluation
        engine = BesideTraining(given.sampler.engine, self.at_once)
        own = {name: sampler.over(engine) for name, sampler in given.own.items()}
        self._measures = replace(given, sampler=given.sampler.over(engine), own=own)

    def begin(self, step: int) -> None:
        """Evaluate the weights that were just pushed after ``step``, unless an earlier evaluation is under way.

        Does nothing if the evaluation of ``step`` has begun, or a resumed run has its row. Raises the error of an
        earlier evaluation.
        """
        self.check()
        if self.step == step or self.recorder.has_evaluation(step):
            return
        if self._running is not None:
            self.skipped += 1
            logger.warning(
                "step %d is not evaluated: the evaluation of step %d is under way; raise eval.every", step, self.step
            )
            return
        self.step = step
        self._running = asyncio.create_task(self._evaluate(step), name=f"evaluation of step {step}")

    def check(self) -> None:
        """Raise what the evaluation raised, if it has ended so."""
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            ended.result()

    async def finish(self, before: int, stop: asyncio.Event | None = None) -> None:
        """Wait for an evaluation of a step before this one, or give it up once ``stop`` is set.

        Raises what it raised.
        """
        if self._running is not None and self.step < before:
            try:
                await unless_stopped(stop or asyncio.Event(), asyncio.wait({self._running}))
            except Stopped:
                logger.warning("step %d is not evaluated: its evaluation was under way when the run stopped", self.step)
                await self.close()
        self.check()

    async def close(self) -> None:
        """Cancel what is under way: a resume from its step's checkpoint begins it again."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
            self._running = None

    async def _evaluate(self, step: int) -> None:
        began = perf_counter()
        row = await self._measures.row(step, pushed=step)
        skipped, self.skipped = self.skipped, 0
        await self.recorder.write(
            {"step": step, "phase": "eval", **row, "eval/skipped": skipped, "seconds/eval": perf_counter() - began}
        )
