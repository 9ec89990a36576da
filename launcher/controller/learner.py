"""All ranks that hold a model as one Learner or FrozenModel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from launcher.controller.group import WorkerGroup
from rl_megatron import digests
from rl_megatron.digests import Digest, Written
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import Learner, Saving
from rl_megatron.training import checkpoints
from rl_megatron.types import (
    Batch,
    Counts,
    Loss,
    Metric,
    ParallelDims,
    Samples,
    Scores,
    SkippedStep,
    StepResult,
    Want,
)

if TYPE_CHECKING:
    from torch import Tensor


class LearnerGroup(Learner):
    """A Learner or FrozenModel over all ranks that hold the model of ``role``.

    Every call raises WorkerDied if a rank has ended.
    """

    def __init__(self, group: WorkerGroup, dims: ParallelDims, role: str) -> None:
        self._group, self._dims, self._role = group, dims, role
        self._routed: list[tuple[int, ...]] = []  # by rank: see MegatronLearner.routed_layers

    @override
    async def start_from(self, folder: Path) -> None:
        await self._group.each("start_from", self._role, folder.resolve())

    @override
    async def release(self) -> None:
        await self._group.each("release")

    @override
    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        """Sends each data-parallel rank its micro-batches."""
        shares = {rank: (self._role, m, want) for rank, m in (await self._shares(batch)).items()}
        answers: list[dict[Want, list[Tensor]] | None] = await self._group.ask("score", shares)
        rows = {self._dims.dp_rank(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        return {what: [rows[d][what] for d in range(self._dims.dp)] for what in want}

    @override
    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
        """Sends each data-parallel rank its micro-batches."""
        common = (loss, batch.num_tokens, batch.num_sequences)
        shares = {rank: (self._role, m, *common) for rank, m in (await self._shares(batch)).items()}
        answers: list[dict[str, Metric[float | Counts]] | None] = await self._group.ask("backward", shares)
        return next(answer for answer in answers if answer is not None)

    @override
    async def step(self, learning_rate: float, scale: float = 1.0) -> StepResult | SkippedStep:
        """A skipped step has the culprits of all ranks."""
        answers: list[StepResult | SkippedStep] = await self._group.each("step", self._role, learning_rate, scale)
        if skipped := [a for a in answers if isinstance(a, SkippedStep)]:  # then all did
            return replace(skipped[0], culprits=tuple(c for a in skipped for c in a.culprits))
        return answers[0]

    async def _shares(self, batch: Batch) -> dict[int, tuple[Samples, ...]]:
        """The micro-batches of each rank: those of its data-parallel rank, with routes of its own layers alone.

        Raises RLMegatronError for routes of another model.
        """
        rows = batch.micro_batches
        numbers = {w.rank: self._dims.dp_rank(w.rank) for w in self._group.workers}
        routed = next((m.routes for m in rows[0] if m.routes is not None), None)
        if routed is None:
            return {rank: rows[d] for rank, d in numbers.items()}
        self._routed = self._routed or await self._group.each("routed_layers", self._role)
        num_layers = 1 + max(layer for layers in self._routed for layer in layers)
        if routed.shape[1] != num_layers:
            raise RLMegatronError(
                f"routes to replay have {routed.shape[1]} MoE layers, but the learner's model has {num_layers}; check "
                "that the engine serves the same model"
            )
        cut = {key: _with_layers(rows[key[0]], key[1]) for key in zip(numbers.values(), self._routed, strict=True)}
        return {rank: cut[d, self._routed[rank]] for rank, d in numbers.items()}

    @override
    async def save(self, folder: Path) -> Saving:
        await self._group.each("save", self._role, folder)
        return _Saving(self._group, self._role)

    @override
    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """Every rank verifies its share of the files before any loads them."""
        shares = digests.deal_out(files, len(self._group.workers))
        mine = {w.rank: (folder, share) for w, share in zip(self._group.workers, shares, strict=True)}
        problems: list[list[str]] = await self._group.ask("verify", mine)
        if any(problems):
            raise checkpoints.unsound(folder.parent, [line for lines in problems for line in lines])
        await self._group.each("load", self._role, folder)


class _Saving(Saving):
    """The save of all ranks that hold the model of ``role``."""

    def __init__(self, group: WorkerGroup, role: str) -> None:
        self._group, self._role = group, role

    @override
    async def written(self) -> bool:
        return all(await self._group.each("written", self._role))

    @override
    async def durable(self) -> Written:
        """The files of all ranks, and the seconds of the slowest."""
        answers: list[Written] = await self._group.each("durable", self._role)
        files = {name: digest for answer in answers for name, digest in answer.files.items()}
        return Written(files=files, seconds=max(answer.seconds for answer in answers))


def _with_layers(row: Sequence[Samples], layers: Sequence[int]) -> tuple[Samples, ...]:
    """The samples with the routes of the given MoE layers alone."""
    return tuple(
        m if m.routes is None or len(layers) == m.routes.shape[1] else replace(m, routes=m.routes[:, list(layers)])
        for m in row
    )
