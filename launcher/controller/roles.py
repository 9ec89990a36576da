"""Presents many ranks as one Learner, one RolloutEngine and one WeightSync, whichever launcher started them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from launcher.controller.group import SlowestRank, WorkerGroup, record_kernels
from rl_megatron import digests
from rl_megatron.columns import Ragged
from rl_megatron.config.beside import frozen_folders, scoring_roles
from rl_megatron.config.run import RunConfig
from rl_megatron.data.rows import OwnLayers, SentRows, Share
from rl_megatron.data.samples import for_pass
from rl_megatron.digests import Digest, SaveDigests
from rl_megatron.engines.local.engine import BatchingEngine
from rl_megatron.errors import CorruptionError, RLMegatronError, SyncError
from rl_megatron.feature import declared_columns
from rl_megatron.interfaces import ForwardPass, Learner, PassResult, RunComponents, SaveHandle, SharedRanks, WeightSync
from rl_megatron.observability import timeline
from rl_megatron.placement.names import LEARNER
from rl_megatron.training import checkpoints
from rl_megatron.types import (
    Batch,
    Completion,
    GenerationRequest,
    Loss,
    Metric,
    ParallelDims,
    Scores,
    SkippedStep,
    StepResult,
    Want,
    WeightUpdate,
)
from rl_megatron.weights.checks.reports import ChecksumReport
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.routes.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class EngineGroup(BatchingEngine):
    """A RolloutEngine over the replicas: each replica serves requests that are made together as one batch."""

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(len(group.workers))
        self._group = group

    @override
    async def batch(self, replica: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
        results: list[list[Completion]]
        (results,) = await self._group.call("generate", {self._group.workers[replica].rank: (requests,)})
        return results


class WeightGroup(WeightSync):
    """A WeightSync in which every learner rank moves its shards to every replica."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Serves ``version`` once all replicas have staged and verified it; tries twice.

        Raises CorruptionError if boxes arrived corrupted twice.
        """
        with timeline.during(timeline.PUSHES, "push", version=version):
            return await self._retry_once(version)

    async def push_extra(self, version: int, *given: object) -> WeightUpdate:
        """Pushes a feature's parameters, not the model's; its ends get the values ``given``. Raises like `push`."""
        await self._group.call_all("announce", *given)
        return await self._retry_once(version, True)

    async def merge(self, *, merged: bool) -> None:
        """Sets whether ranks merge these parameters into the model that they push from now on."""
        await self._group.call_all("merge", merged)

    async def _retry_once(self, version: int, is_extra: bool = False) -> WeightUpdate:
        """Stages and commits. Stages corrupted transfers again, once."""
        updates, failures = await self._stage(version, is_extra)
        if failures:
            logger.warning("weights were corrupted in transfer; sending them again: %s", failures[0])
            again, failures = await self._stage(version, is_extra)
            updates += again
        if failures:
            raise failures[0]
        with timeline.during(timeline.PUSHES, "commit"):
            await self._group.call_all("commit", version, is_extra)
        return _one_update(version, updates)

    async def mirror_checksums(self) -> list[dict[str, int]]:
        """Returns the checksum of each tensor that each rank holds for its engine."""
        held: list[dict[str, int]] = await self._group.call_all("checksums")
        return held

    async def _stage(self, version: int, is_extra: bool) -> tuple[list[WeightUpdate], list[CorruptionError]]:
        with timeline.during(timeline.PUSHES, "stage"):
            answers: list[WeightUpdate | CorruptionError] = await self._group.call_all("stage", version, is_extra)
        return (
            [answer for answer in answers if isinstance(answer, WeightUpdate)],
            [answer for answer in answers if isinstance(answer, CorruptionError)],
        )

    async def sums(self) -> list[ChecksumReport]:
        """Returns each rank's checksums of its boxes, of the version pushed last."""
        reports: list[ChecksumReport] = await self._group.call_all("sums")
        return reports

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        """Makes every rank join the group at ``rendezvous`` with engine ranks that hold ``ranks``. Raises SyncError."""
        for answer in await self._group.call_all("join_engines", rendezvous, ranks):
            if answer is not None:
                raise answer

    async def send(self, version: int) -> tuple[WeightUpdate, list[ChecksumReport]]:
        """Makes every rank send its shards to the engine ranks. Returns each one's checksums too. Raises SyncError."""
        answers: list[tuple[WeightUpdate, ChecksumReport] | SyncError] = await self._group.call_all("send", version)
        for answer in answers:
            if isinstance(answer, SyncError):
                raise answer
        said = [answer for answer in answers if not isinstance(answer, SyncError)]
        return _one_update(version, [update for update, _ in said]), [report for _, report in said]

    @override
    async def export(self, folder: Path) -> None:
        """Makes rank 0 write the version pushed last."""
        await self._group.call("export", {0: (folder,)})


def _one_update(version: int, updates: Sequence[WeightUpdate]) -> WeightUpdate:
    return WeightUpdate(
        version=version,
        num_bytes=sum(u.num_bytes for u in updates),
        seconds=max(u.seconds for u in updates),
        verify_seconds=max(u.verify_seconds for u in updates),
    )


class BatchCalls:
    """The calls of a group's ranks that take micro-batches.

    The first rank of each data-parallel rank's ranks gets that one's share, and passes it on to the others.
    """

    def __init__(self, group: WorkerGroup, dims: ParallelDims) -> None:
        self._group, self._dims, self._sent = group, dims, SentRows(dims.dp)
        self._held = False  # ranks may hold rows, also of a step whose later shares could not be computed
        self._lock = asyncio.Lock()  # ranks hold what earlier calls brought

    async def score(self, batch: Batch, passes: Sequence[ForwardPass]) -> list[PassResult]:
        """Returns the results of all passes over the batch. Raises the errors of `call`."""
        answers: list[list[tuple[dict[Want, list[Tensor]] | None, float]]]
        answers = await self.call("score", tuple(passes), batch, to_score=True)
        return [
            PassResult(
                scores=self._merge_data_ranks(one.outputs, [each[0] for each in said]),
                seconds=max(each[1] for each in said),
            )
            for one, said in zip(passes, zip(*answers, strict=True), strict=True)
        ]

    def _merge_data_ranks(
        self, want: frozenset[Want], answers: Sequence[dict[Want, list[Tensor]] | None]
    ) -> dict[Want, Scores]:
        """Returns scores [D][M] from the answers of all ranks, in rank order."""
        rows = {self._dims.dp_rank(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        return {what: [rows[d][what] for d in range(self._dims.dp)] for what in want}

    async def call(
        self, name: str, task: str | tuple[ForwardPass, ...], batch: Batch, *rest: Any, to_score: bool
    ) -> list[Any]:
        """Calls every rank with its micro-batches of the batch and ``rest``. Returns answers in rank order.

        ``task`` are the passes, or the role of the only one. ``to_score``: without the columns that a loss alone
        reads. Raises the errors of `WorkerGroup.gather`.
        """
        async with self._lock:
            shares = await self._shares(batch, to_score=to_score)
            without = (task, None, *rest)
            given = {
                w.rank: (task, shares[w.rank], *rest) if w.rank in shares else without for w in self._group.workers
            }
            self._held = True
            answers = self._group.send(name, given)
        return await self._group.gather(answers)

    async def forget(self) -> None:
        """Frees the rows of a step on the ranks."""
        async with self._lock:
            if not self._held:
                return
            self._held = False
            self._sent.forget()
            answers = self._group.send("free_step", dict.fromkeys((w.rank for w in self._group.workers), ()))
        await self._group.gather(answers)

    async def _shares(self, batch: Batch, *, to_score: bool) -> dict[int, Share]:
        """Returns each data-parallel rank's share, by the rank that gets it. Computed outside of the event loop."""
        sent, self._sent = self._sent, SentRows(self._dims.dp, after=self._sent.step + 1)
        shares = await asyncio.to_thread(sent.shares, batch, to_score=to_score)
        self._sent = sent  # not reached if canceled: no rank holds unsent rows
        return {d * self._dims.tp * self._dims.cp: share for d, share in enumerate(shares)}


class LearnerGroup(Learner):
    """A Learner or FrozenModel over all ranks that hold the model of ``role``.

    Every call raises WorkerFailure if a rank has ended.
    """

    def __init__(self, group: WorkerGroup, role: str, calls: BatchCalls) -> None:
        """``calls`` is that of the group, which models on the same ranks share."""
        self._group, self.role, self._calls = group, role, calls
        self._num_layers: dict[str, int] = {}  # column -> number of layers with entries; empty: not known yet

    @override
    async def load_weights(self, folder: Path) -> None:
        await self._group.call_all("load_weights", self.role, folder.resolve())

    @override
    async def release_memory(self) -> None:
        await self._group.call_all("release_memory")

    @override
    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        """Makes each data-parallel rank score its micro-batches. The policy replays the batch's routes."""
        asked = ForwardPass(
            role=self.role,
            outputs=want,
            replays_routes=self.role == "policy",
            appends_last_targets=batch.appends_last_targets,
        )
        (said,) = await LearnerGroups([self], self._calls).score(batch, [asked])
        return said.scores

    @override
    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
        """Makes each data-parallel rank add the gradients of its micro-batches."""
        await self.check_columns(batch)
        common = (loss, batch.num_tokens, batch.num_sequences)
        answers = await self._calls.call("backward", self.role, batch, *common, to_score=False)
        metrics: dict[str, Metric[float]] = next(answer for answer in answers if answer is not None)
        return metrics

    @override
    async def free_step(self) -> None:
        await self._calls.forget()

    @override
    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        """Makes an optimizer step. A skipped step has the culprits of all ranks."""
        answers: list[StepResult | SkippedStep] = await self._group.call_all("step", self.role, learning_rate)
        if skipped := [a for a in answers if isinstance(a, SkippedStep)]:  # then all did
            return replace(skipped[0], culprits=tuple(c for a in skipped for c in a.culprits))
        return answers[0]

    @override
    async def zero_grad(self) -> None:
        await self._group.call_all("zero_grad", self.role)

    @override
    async def update_reference(self, rate: float) -> None:
        await self._group.call_all("update_reference", rate)

    async def check_columns(self, batch: Batch) -> None:
        """Raises RLMegatronError for columns with entries of another model's layers."""
        for name, column in batch.samples.extra.items():
            if declared_columns()[name].layers is None:
                continue
            assert not isinstance(column, Ragged), "rows of samples are refused then"
            if not self._num_layers:
                of_ranks: list[OwnLayers] = await self._group.call_all("column_layers", self.role)
                last = {of: max((layer for its in of_ranks for layer in its[of]), default=-1) for of in of_ranks[0]}
                self._num_layers = {of: layer + 1 for of, layer in last.items()}
            if column.shape[1] != self._num_layers[name]:
                raise RLMegatronError(
                    f"the engine's {name} have {column.shape[1]} layers, but the learner's model has "
                    f"{self._num_layers[name]} of that kind; check that the engine serves the same model"
                )

    @override
    async def save(self, folder: Path) -> SaveHandle:
        await self._group.call_all("save", self.role, folder)
        return _Saving(self._group, self.role)

    @override
    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """Loads a checkpoint. Every rank verifies its share of the files before any rank loads them."""
        shares = digests.deal_out(files, len(self._group.workers))
        mine = {w.rank: (folder, share) for w, share in zip(self._group.workers, shares, strict=True)}
        problems: list[list[str]] = await self._group.call("verify", mine)
        if any(problems):
            raise checkpoints.unsound(folder.parent, [line for lines in problems for line in lines])
        await self._group.call_all("load", self.role, folder)


class LearnerGroups(SharedRanks):
    """The models on the ranks of one group."""

    def __init__(self, models: Sequence[LearnerGroup], calls: BatchCalls) -> None:
        """``calls`` is that of the group."""
        self._models, self._calls = {one.role: one for one in models}, calls

    @property
    @override
    def roles(self) -> Collection[str]:
        return self._models.keys()

    @override
    async def score(self, batch: Batch, passes: Sequence[ForwardPass]) -> list[PassResult]:
        for one in passes:
            if one.replays_routes:
                await self._models[one.role].check_columns(batch)
        if not any(one.replays_routes for one in passes):  # columns of the policy's layers are not sent to other models
            batch = for_pass(batch, replays=False, last_tokens=batch.appends_last_targets)
        return await self._calls.score(batch, passes)


class _Saving(SaveHandle):
    """The save of all ranks that hold the model of ``role``."""

    def __init__(self, group: WorkerGroup, role: str) -> None:
        self._group, self._role = group, role

    @override
    async def is_written(self, *, wait: bool = False) -> bool:
        return all(await self._group.call_all("is_written", self._role, wait))

    @override
    async def finalize(self) -> SaveDigests:
        """Returns the files of all ranks, and the seconds of the slowest."""
        answers: list[SaveDigests] = await self._group.call_collective("finalize", self._role)
        files = {name: digest for answer in answers for name, digest in answer.files.items()}
        return SaveDigests(files=files, seconds=max(answer.seconds for answer in answers))


def make_components(groups: Mapping[str, WorkerGroup], config: RunConfig) -> RunComponents:
    """Returns the trainer's view of ready ranks: roles without their own ranks are on the learner's."""
    group = groups[LEARNER]
    trained = {"policy": True, "critic": config.algorithm.needs_critic}
    scoring = dict.fromkeys(scoring_roles(config), True)
    frozen = {role: role not in scoring for role in frozen_folders(config)}
    batch_calls = {role: BatchCalls(its, config.role_learner(role).dims) for role, its in groups.items()}
    learners, others, reward_models = (
        {
            role: LearnerGroup(groups.get(role, group), role, batch_calls.get(role, batch_calls[LEARNER]))
            for role, needed in roles.items()
            if needed
        }
        for roles in (trained, frozen, scoring)
    )
    models = [*learners.values(), *others.values(), *reward_models.values()]
    together = [
        LearnerGroups([one for one in models if (one.role if one.role in groups else LEARNER) == name], calls)
        for name, calls in batch_calls.items()
    ]

    return RunComponents(
        learners=learners,
        frozen_models=others,
        reward_models=reward_models,
        engine=EngineGroup(group),
        weight_sync=WeightGroup(group),
        shared_ranks=together,
        gpu_names=group.gpus,
        rank_metrics=SlowestRank(group.workers).row,
        record_kernels=partial(record_kernels, groups.values()),
    )
