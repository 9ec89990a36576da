"""Evaluates a version of the weights while later steps train: on training's servers, or on servers of its own."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from time import perf_counter

from rl_megatron.errors import Stopped
from rl_megatron.interfaces import PinnedEngine
from rl_megatron.observability.recorder import Recorder, Row
from rl_megatron.rollout.beside_training import BesideTraining
from rl_megatron.training.evaluation import Evaluation
from rl_megatron.training.tasks import unless_stopped

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EvaluationBeside:
    """One evaluation at a time; its row of metrics, of phase ``eval``, is written when it ends.

    Engines with priorities take its requests behind those of training. With ``pinned`` servers, which keep the version,
    they sample instead; should all of these die, the evaluation is left out.
    """

    evaluation: Evaluation
    recorder: Recorder
    at_once: int | None = None  # the most requests that servers have at once; None: all
    pinned: PinnedEngine | None = None
    step: int = 0  # of the last one that began
    skipped: int = 0  # evaluations that were due while one was under way, since the last row
    _measures: Evaluation = field(init=False)
    _running: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        given = self.evaluation
        engine = self.pinned.engine if self.pinned else BesideTraining(given.sampler.engine, self.at_once)
        own = {name: sampler.over(engine) for name, sampler in given.own.items()}
        self._measures = replace(given, sampler=given.sampler.over(engine), own=own)

    async def begin(self, step: int) -> None:
        """Evaluate the weights that were just pushed after ``step``, unless an earlier evaluation is under way.

        Returns once training may go on; at once where the evaluation of ``step`` has begun, or a run that is resumed
        has its row. Raises what an earlier one raised.
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
        held = asyncio.Event()
        self._running = asyncio.create_task(self._evaluate(step, held), name=f"evaluation of step {step}")
        waits = asyncio.create_task(held.wait())
        await asyncio.wait({self._running, waits}, return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()

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

    async def _evaluate(self, step: int, held: asyncio.Event) -> None:
        began = perf_counter()
        if self.pinned is None:
            held.set()
            row: Row | None = await self._measures.row(step, pushed=step)
        else:
            row = await self._by_pinned(self.pinned, step, held)
        if row is None:
            self.skipped += 1
            logger.warning("step %d is not evaluated: no server of evaluations has its weights", step)
            return
        skipped, self.skipped = self.skipped, 0
        await self.recorder.write(
            {"step": step, "phase": "eval", **row, "eval/skipped": skipped, "seconds/eval": perf_counter() - began}
        )

    async def _by_pinned(self, servers: PinnedEngine, step: int, held: asyncio.Event) -> Row | None:
        """Metrics by ``servers`` that have the weights of ``step``; None if none of them has, or all have died."""
        began = perf_counter()
        if not await servers.pin(step, held.set):
            return None
        seconds = perf_counter() - began
        measuring = asyncio.create_task(self._measures.row(step, pushed=step))
        lost = asyncio.create_task(servers.lost())
        try:
            await asyncio.wait({measuring, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                lost.result()
            if not measuring.done() or (measuring.exception() is not None and not servers.serving):
                return None
            return {**measuring.result(), "eval/servers": servers.serving, "seconds/pin": seconds}
        finally:
            for one in (measuring, lost):
                one.cancel()
            await asyncio.gather(measuring, lost, return_exceptions=True)
