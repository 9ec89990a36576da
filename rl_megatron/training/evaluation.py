"""Evaluates the policy on sets of held-out problems, at the steps of each.

Evaluates a version of the weights on the servers that sample for training, while later steps train.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from rl_megatron.config.sections.eval import EvalSection
from rl_megatron.errors import StopRequested, wait_or_stop
from rl_megatron.evaluation.sets import EvalSet, measure, set_metrics
from rl_megatron.observability.recorder import Recorder, Row
from rl_megatron.rollout.policy_sampler import LowPriorityEngine, PolicySampler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures ``sets`` with the weights that were pushed last, one after the other. The first gives eval/accuracy."""

    sampler: PolicySampler
    own_samplers: Mapping[str, PolicySampler] = field(
        default_factory=dict
    )  # set's name -> its own sampler, if it has one
    sets: Sequence[EvalSet]
    section: EvalSection
    last_step: int  # all sets without steps of their own are due after it

    def due(self, step: int) -> bool:
        """True if a set is evaluated after ``step``."""
        return bool(self._due(step))

    async def row(self, step: int | None = None, *, pushed: int | None = None) -> Row:
        """Returns metrics of the sets that are due after ``step``; without one, of the first set. With the version
        ``pushed`` for it, they include the share of tokens sampled with that version."""
        row: Row = {}
        own = sampled = 0
        for one in self.sets[:1] if step is None else self._due(step):
            measured = await measure(self.own_samplers.get(one.name or "", self.sampler), one, self.section)
            own += measured.versions.get(pushed, 0) if pushed is not None else 0
            sampled += sum(measured.versions.values())
            if one is self.sets[0]:
                row["eval/accuracy"] = sum(measured.right) / (len(one.prompts) * one.section.samples)
                row["eval/errors"] = measured.errors
            if one.name is not None:
                row |= set_metrics(one.name, measured, one.section.pass_at)
        if pushed is not None and sampled:
            row["eval/current_version_fraction"] = own / sampled
        return row

    async def wait_closed(self) -> None:
        """Waits for what its samplers still release, of training's groups too where these are from ``sampler``."""
        for one in (self.sampler, *self.own_samplers.values()):
            await one.wait_closed()

    def _due(self, step: int) -> list[EvalSet]:
        last = step == self.last_step
        return [one for one in self.sets if one.section.due(step, every=self.section.every, last=last)]


@dataclass(slots=True, kw_only=True)
class BackgroundEvaluator:
    """One evaluation at a time; its row of metrics, of phase ``eval``, is written when it ends.

    Engines with priorities take its requests after those of training.
    """

    evaluation: Evaluator
    recorder: Recorder
    max_requests: int | None = None  # the most requests that servers have at a time; None: all
    step: int = 0  # step of the last evaluation that began
    _measures: Evaluator = field(init=False)
    _running: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        given = self.evaluation
        engine = LowPriorityEngine(given.sampler.engine, self.max_requests)
        own = {name: sampler.with_engine(engine) for name, sampler in given.own_samplers.items()}
        self._measures = replace(given, sampler=given.sampler.with_engine(engine), own_samplers=own)

    def begin(self, step: int) -> None:
        """Evaluates the weights that were just pushed after ``step``, unless an earlier evaluation is still running.

        Does nothing if the evaluation of ``step`` has begun, or a resumed run has its row. Raises the error of an
        earlier evaluation.
        """
        self.check()
        if self.step == step or self.recorder.has_evaluation(step):
            return
        if self._running is not None:
            logger.warning(
                "step %d is not evaluated: the evaluation of step %d is under way; raise eval.every", step, self.step
            )
            return
        self.step = step
        self._running = asyncio.create_task(self._evaluate(step), name=f"evaluation of step {step}")

    def check(self) -> None:
        """Raises the error of the evaluation, if it has failed."""
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            ended.result()

    async def finish(self, before: int, stop: asyncio.Event | None = None) -> None:
        """Waits for an evaluation of a step before this one, or gives it up once ``stop`` is set.

        Raises the evaluation's error.
        """
        if self._running is not None and self.step < before:
            try:
                await wait_or_stop(stop or asyncio.Event(), asyncio.wait({self._running}))
            except StopRequested:
                logger.warning("step %d is not evaluated: its evaluation was under way when the run stopped", self.step)
                await self.close()
        self.check()

    async def close(self) -> None:
        """Cancels a running evaluation: a resume from its step's checkpoint begins it again."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
            self._running = None

    async def _evaluate(self, step: int) -> None:
        began = perf_counter()
        row = await self._measures.row(step, pushed=step)
        await self.recorder.write({"step": step, "phase": "eval", **row, "seconds/eval": perf_counter() - began})
