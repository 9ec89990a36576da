"""All ranks that hold a model as one Learner or FrozenModel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from launcher.controller.group import WorkerGroup
from launcher.controller.plane import Plane
from rl_megatron import digests
from rl_megatron.digests import Digest, Written
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import Learner, Pass, PassScores, Saving, Together
from rl_megatron.training import checkpoints
from rl_megatron.types import (
    Batch,
    Counts,
    Loss,
    Metric,
    Scores,
    SkippedStep,
    StepResult,
    Want,
)


class LearnerGroup(Learner):
    """A Learner or FrozenModel over all ranks that hold the model of ``role``.

    Every call raises WorkerDied if a rank has ended.
    """

    def __init__(self, group: WorkerGroup, role: str, plane: Plane) -> None:
        """``plane`` is that of the group, which models on the same ranks share."""
        self._group, self.role, self._plane = group, role, plane
        self._num_routed = 0  # MoE layers of the model; 0: not known yet

    @override
    async def start_from(self, folder: Path) -> None:
        await self._group.each("start_from", self.role, folder.resolve())

    @override
    async def release(self) -> None:
        await self._group.each("release")

    @override
    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        """Each data-parallel rank scores its micro-batches."""
        asked = Pass(role=self.role, want=want, replays=True, last_tokens=batch.last_tokens)
        (said,) = await LearnerGroups([self], self._plane).score(batch, [asked])
        return said.scores

    @override
    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
        """Each data-parallel rank adds the gradients of its micro-batches."""
        await self.check_routes(batch)
        common = (loss, batch.num_tokens, batch.num_sequences)
        answers = await self._plane.call("backward", self.role, batch, *common, to_score=False)
        said: dict[str, Metric[float | Counts]] = next(answer for answer in answers if answer is not None)
        return said

    @override
    async def forget(self) -> None:
        await self._plane.forget()

    @override
    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        """A skipped step has the culprits of all ranks."""
        answers: list[StepResult | SkippedStep] = await self._group.each("step", self.role, learning_rate)
        if skipped := [a for a in answers if isinstance(a, SkippedStep)]:  # then all did
            return replace(skipped[0], culprits=tuple(c for a in skipped for c in a.culprits))
        return answers[0]

    @override
    async def drop(self) -> None:
        await self._group.each("drop", self.role)

    @override
    async def reset_moments(self) -> None:
        await self._group.each("reset_moments", self.role)

    @override
    async def lead(self, rate: float) -> None:
        await self._group.each("lead", rate)

    async def check_routes(self, batch: Batch) -> None:
        """Raise RLMegatronError for routes of another model."""
        routes = batch.samples.routes
        if routes is None:
            return
        self._num_routed = self._num_routed or await self._count_routed()
        if routes.shape[1] != self._num_routed:
            raise RLMegatronError(
                f"routes to replay have {routes.shape[1]} MoE layers, but the learner's model has {self._num_routed}; "
                "check that the engine serves the same model"
            )

    async def _count_routed(self) -> int:
        layers: list[tuple[int, ...]] = await self._group.each("routed_layers", self.role)
        return 1 + max(layer for of_rank in layers for layer in of_rank)

    @override
    async def save(self, folder: Path) -> Saving:
        await self._group.each("save", self.role, folder)
        return _Saving(self._group, self.role)

    @override
    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """Every rank verifies its share of the files before any loads them."""
        shares = digests.deal_out(files, len(self._group.workers))
        mine = {w.rank: (folder, share) for w, share in zip(self._group.workers, shares, strict=True)}
        problems: list[list[str]] = await self._group.ask("verify", mine)
        if any(problems):
            raise checkpoints.unsound(folder.parent, [line for lines in problems for line in lines])
        await self._group.each("load", self.role, folder)


class LearnerGroups(Together):
    """The models on the ranks of one group."""

    def __init__(self, models: Sequence[LearnerGroup], plane: Plane) -> None:
        """``plane`` is that of the group."""
        self._models, self._plane = {one.role: one for one in models}, plane

    @property
    @override
    def roles(self) -> Collection[str]:
        return self._models.keys()

    @override
    async def score(self, batch: Batch, passes: Sequence[Pass]) -> list[PassScores]:
        for one in passes:
            if one.replays:
                await self._models[one.role].check_routes(batch)
        return await self._plane.score(batch, passes)


class _Saving(Saving):
    """The save of all ranks that hold the model of ``role``."""

    def __init__(self, group: WorkerGroup, role: str) -> None:
        self._group, self._role = group, role

    @override
    async def written(self, *, wait: bool = False) -> bool:
        return all(await self._group.each("written", self._role, wait))

    @override
    async def durable(self) -> Written:
        """The files of all ranks, and the seconds of the slowest."""
        answers: list[Written] = await self._group.meet("durable", self._role)
        files = {name: digest for answer in answers for name, digest in answer.files.items()}
        return Written(files=files, seconds=max(answer.seconds for answer in answers))
