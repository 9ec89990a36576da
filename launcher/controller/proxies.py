"""Presents many ranks as one Learner, one RolloutEngine and one WeightSync, whichever launcher started them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from launcher.controller.group import WorkerGroup
from launcher.controller.handle import WorkerHandle
from rl_megatron import digests
from rl_megatron.config.run import RunConfig
from rl_megatron.digests import Digest
from rl_megatron.errors import CorruptionError, RLMegatronError, SyncError
from rl_megatron.interfaces import Learner, Roles, RolloutEngine, WeightSync
from rl_megatron.placement.names import LEARNER
from rl_megatron.training import checkpoints
from rl_megatron.types import (
    Batch,
    Completion,
    Counts,
    GenerationRequest,
    Loss,
    Metric,
    ParallelDims,
    Samples,
    Scores,
    SkippedStep,
    StepResult,
    Want,
    WeightUpdate,
)
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.transports.joined import Rendezvous

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def roles_of(groups: Mapping[str, WorkerGroup], config: RunConfig) -> Roles:
    """The trainer's view of ready ranks: roles without their own ranks are on the learner's."""
    dims, group = config.learner.dims, groups[LEARNER]
    trained = {"policy": True, "critic": config.algorithm.needs_critic}
    frozen = {"reference": config.algorithm.needs_reference}
    learners, others = (
        {role: LearnerGroup(groups.get(role, group), dims, role) for role, needed in roles.items() if needed}
        for roles in (trained, frozen)
    )
    return Roles(learners=learners, frozen=others, engine=EngineGroup(group), weights=WeightGroup(group))


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
    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        """A skipped step has the culprits of all ranks."""
        answers: list[StepResult | SkippedStep] = await self._group.each("step", self._role, learning_rate)
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
    async def save(self, folder: Path) -> dict[str, Digest]:
        """Every rank writes its shards. Returns all digests in one mapping."""
        answers: list[dict[str, Digest]] = await self._group.each("save", self._role, folder)
        return {name: digest for answer in answers for name, digest in answer.items()}

    @override
    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """Every rank verifies its share of the files before any loads them."""
        shares = digests.deal_out(files, len(self._group.workers))
        mine = {w.rank: (folder, share) for w, share in zip(self._group.workers, shares, strict=True)}
        problems: list[list[str]] = await self._group.ask("verify", mine)
        if any(problems):
            raise checkpoints.unsound(folder.parent, [line for lines in problems for line in lines])
        await self._group.each("load", self._role, folder)


def _with_layers(row: Sequence[Samples], layers: Sequence[int]) -> tuple[Samples, ...]:
    """The samples with the routes of the given MoE layers alone."""
    return tuple(
        m if m.routes is None or len(layers) == m.routes.shape[1] else replace(m, routes=m.routes[:, list(layers)])
        for m in row
    )


class EngineGroup(RolloutEngine):
    """A RolloutEngine over the replicas: each replica serves requests that are made together as one batch."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Distributes the requests of one turn of the event loop over the replicas."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[Completion]] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._dispatch)  # after all callers that are ready have asked
        self._pending.append((request, answer))
        return await answer

    def _dispatch(self) -> None:
        pending, self._pending = self._pending, []
        count = len(self._group.workers)
        for replica, handle in enumerate(self._group.workers):
            if share := pending[replica::count]:
                task = asyncio.ensure_future(self._serve(handle, share))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, handle: WorkerHandle, share: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]]
    ) -> None:
        try:
            (results,) = await self._group.ask("generate", {handle.rank: ([request for request, _ in share],)})
        except Exception as error:  # noqa: BLE001  the callers raise it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), completions in zip(share, results, strict=True):
            if not answer.done():
                answer.set_result(completions)


class WeightGroup(WeightSync):
    """A WeightSync in which every learner rank moves its shards to every replica."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Serves ``version`` once all replicas have staged and verified it; tries twice.

        Raises CorruptionError if boxes arrived corrupted twice.
        """
        updates, failures = await self._stage(version)
        if failures:
            logger.warning("weights were corrupted in transfer and are sent again: %s", failures[0])
            again, failures = await self._stage(version)
            updates += again
        if failures:
            raise failures[0]
        await self._group.each("commit", version)
        return _joined(version, updates)

    async def held(self) -> list[dict[str, int]]:
        """The checksum of each tensor that each rank holds for its engine."""
        held: list[dict[str, int]] = await self._group.each("checksums")
        return held

    async def _stage(self, version: int) -> tuple[list[WeightUpdate], list[CorruptionError]]:
        answers: list[WeightUpdate | CorruptionError] = await self._group.each("stage", version)
        return (
            [answer for answer in answers if isinstance(answer, WeightUpdate)],
            [answer for answer in answers if isinstance(answer, CorruptionError)],
        )

    async def sums(self) -> list[Report]:
        """Each rank's checksums of its boxes, of the version pushed last."""
        reports: list[Report] = await self._group.each("sums")
        return reports

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        """Have every rank join the group at ``rendezvous`` with engine ranks that hold ``ranks``. Raises SyncError."""
        for answer in await self._group.each("join_engines", rendezvous, ranks):
            if answer is not None:
                raise answer

    async def send(self, version: int) -> tuple[WeightUpdate, list[Report]]:
        """Have every rank send its shards to the engine ranks. Returns each one's checksums too. Raises SyncError."""
        answers: list[tuple[WeightUpdate, Report] | SyncError] = await self._group.each("send", version)
        for answer in answers:
            if isinstance(answer, SyncError):
                raise answer
        said = [answer for answer in answers if not isinstance(answer, SyncError)]
        return _joined(version, [update for update, _ in said]), [report for _, report in said]

    @override
    async def export(self, folder: Path) -> None:
        """Have rank 0 write the version pushed last."""
        await self._group.ask("export", {0: (folder,)})


def _joined(version: int, updates: Sequence[WeightUpdate]) -> WeightUpdate:
    return WeightUpdate(
        version=version,
        num_bytes=sum(u.num_bytes for u in updates),
        seconds=max(u.seconds for u in updates),
        verify_seconds=max(u.verify_seconds for u in updates),
    )
