"""Evaluates a version of the weights while later steps train."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from time import perf_counter

from rl_megatron.observability.recorder import Recorder
from rl_megatron.rollout.beside_training import BesideTraining
from rl_megatron.rollout.policy_sampler import PolicySampler
from rl_megatron.training.evaluation import Evaluation

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EvaluationBeside:
    """One evaluation at a time; its row of metrics, of phase ``eval``, is written when it ends.

    Engines with priorities take its requests behind those of training.
    """

    evaluation: Evaluation
    recorder: Recorder
    at_once: int | None = None  # the most requests that servers have at once; None: all
    step: int = 0  # of the last one that began
    skipped: int = 0  # evaluations that were due while one was under way, since the last row
    _behind: Evaluation = field(init=False)
    _running: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        given = self.evaluation
        own = {name: self._behind_training(sampler) for name, sampler in given.own.items()}
        self._behind = replace(given, sampler=self._behind_training(given.sampler), own=own)

    def begin(self, step: int) -> None:
        """Evaluate the weights that were just pushed after ``step``, unless an earlier evaluation is under way.

        Raises what an earlier one raised.
        """
        self.check()
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

    async def finish(self, before: int) -> None:
        """Wait for an evaluation of a step before this one. Raises what it raised."""
        if self._running is not None and self.step < before:
            await asyncio.wait({self._running})
        self.check()

    async def close(self) -> None:
        """Cancel what is under way: a resume from its step's checkpoint evaluates again."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
            self._running = None

    def _behind_training(self, sampler: PolicySampler) -> PolicySampler:
        return replace(sampler, engine=BesideTraining(sampler.engine, self.at_once))

    async def _evaluate(self, step: int) -> None:
        began = perf_counter()
        row = await self._behind.row(step, pushed=step)
        skipped, self.skipped = self.skipped, 0
        self.recorder.write(
            {"step": step, "phase": "eval", **row, "eval/skipped": skipped, "seconds/eval": perf_counter() - began}
        )
