"""Asks all models of a run for their scores of a step's samples, before any of them changes.

Samples are packed once for each layout. Models on the same ranks get them by one request, which asks for all columns:
those of one model by one pass. A judge that reads other sequences gets them by a request for them alone.
A reward model on ranks of its own is asked while engines sample.
Letters: N positions of the samples, S sequences.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import to_thread
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron import feature
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer, make_packer, unpack
from rl_megatron.data.samples import append_last_targets, check_tokens, for_pass, scored_row, supervised_samples
from rl_megatron.feature import Judge, Judges
from rl_megatron.interfaces import ForwardPass, PassResult, RunComponents, Scorer, SharedRanks
from rl_megatron.observability import timeline
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.rewards.scoring import queued_slot
from rl_megatron.seeds import make_seed
from rl_megatron.types import Batch, Samples, Want

T = TypeVar("T")
RankOf: TypeAlias = NDArray[np.int64]
"""The data-parallel rank of each sequence [S]."""

_VALUES: frozenset[Want] = frozenset({"values"})
LOGPROBS: frozenset[Want] = frozenset({"logprobs"})


def policy_score_kinds(config: RunConfig) -> frozenset[Want]:
    """Returns the scores that the policy must give: none, or log-probs. Features may need others, a choice of tokens
    the entropy, and an optimal baseline the norms that weigh it."""
    wanted = feature.wanted(config)
    if not config.algorithm.scores_policy and not wanted:
        return wanted
    wanted |= LOGPROBS
    if config.algorithm.tokens.choose == "top_entropy":
        wanted |= {"entropy"}
    return wanted | {"logit_norms"} if config.algorithm.credit == "optimal" else wanted


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """A batch's samples with all scores that the algorithm needs."""

    samples: Samples
    policy: Mapping[Want, Tensor]  # its scores at the start of the update that were asked for, [N, ...] each
    next_values: Tensor | None = None  # [S]

    @property
    def current(self) -> Tensor | None:
        """The policy's log-probs [N] at the start of the update."""
        return self.policy.get("logprobs")


class RankTasks:
    """Runs calls to several models concurrently. Calls to models that share processes run one after the other.

    A phase counts only the seconds spent waiting for it, so that phases add up to the time that passed.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        return self

    def start(self, phase: str, question: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts ``question`` after the questions already begun."""
        task = asyncio.create_task(question, name=phase)
        self._tasks.append(task)
        return task

    async def end(self, task: asyncio.Task[T]) -> T:
        """Waits for the answer, and counts the wait for its phase."""
        with self._watch(task.get_name()):
            return await task

    async def end_shared(self, task: asyncio.Task[T], seconds: Callable[[T], Mapping[str, float]]) -> T:
        """Waits for the answer, and counts the wait for phases in proportion to the ``seconds`` of the answer."""
        began = timeline.now()
        said = await task
        self._watch.share(began, seconds(said))
        return said

    async def __aexit__(self, *_: object) -> None:
        """Cancels what is not finished; errors of other models would have the same cause."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True, kw_only=True)
class Packers:
    """The packing of each role's batches: for the learner's layout, or for the role's own."""

    config: RunConfig
    attention_cost: float
    unit: int = 1
    own: Packer = field(init=False)
    others: Mapping[str, Packer] = field(init=False)

    def __post_init__(self) -> None:
        whole = self.config.train.minibatch_by_group
        make = partial(make_packer, attention_cost=self.attention_cost, unit=self.unit, whole_groups=whole)
        self.own = make(self.config.learner)
        self.others = {role: make(self.config.role_learner(role)) for role in self.config.roles.layouts}

    def packed(
        self,
        samples: Samples,
        step: int,
        role: str = "policy",
        *,
        with_room: bool = False,
        part: NDArray[np.int64] | None = None,
    ) -> Batch:
        """Packs all sequences, or ``part``. Those of a role that is trained are where it is trained on them first, so
        that their columns are there once they were scored. ``with_room`` is that of `Packer.pack`."""
        packer = self.others.get(role, self.own)
        if part is not None and len(part) < samples.num_sequences:
            return packer.pack(samples, part=part, with_room=with_room)
        most, seed = self.config.train.minibatches, make_seed(self.config.seed, step, 0)
        is_trained = packer is self.own or role == "critic"
        ranks: RankOf | None = packer.ranks(samples, limit=most, seed=seed) if is_trained else None
        return packer.pack(samples, ranks=ranks, with_room=with_room)

    def pack_untrained(self, samples: Samples, role: str, longest: int) -> Batch:
        """Packs all sequences of samples that are not trained on; a server may read longer ones than a micro-batch."""
        packer = self.others.get(role, self.own)
        return replace(packer, max_tokens=max(packer.max_tokens, longest)).pack(samples)

    def repack(self, role: str, batch: Batch) -> Batch:
        """Returns the batch for the ranks of ``role``, packed again if they have a layout of their own."""
        other = self.others.get(role)
        return batch if other is None else other.repack(batch)


@dataclass(slots=True, kw_only=True)
class _Request:
    """Passes over one batch, with the phase that each is counted for, and the role that answers; ``ranks`` make them
    all. The first is of ``judge``, if it is of one."""

    ranks: SharedRanks | None
    judge: Judge | None = None
    phases: list[str] = field(default_factory=list)
    passes: list[ForwardPass] = field(default_factory=list)
    scorer: list[str] = field(default_factory=list)
    batch: Batch | None = None

    @property
    def read(self) -> Samples | None:
        """The sequences, where they are not the step's samples."""
        return None if self.judge is None else self.judge.read

    def seconds(self, results: Sequence[PassResult]) -> dict[str, float]:
        """Returns the seconds that the answered passes took, added up by phase."""
        found = dict.fromkeys(self.phases, 0.0)
        for phase, one in zip(self.phases, results, strict=True):
            found[phase] += one.seconds
        return found


async def score_batch(
    config: RunConfig,
    roles: RunComponents,
    packers: Packers,
    samples: Samples,
    step: int,
    watch: Stopwatch,
    judges: Judges | None = None,
) -> ScoredSamples:
    """Returns the samples with the scores that the algorithm needs alone; the reference's are those of ``judges``."""
    requests = _requests(config, roles, samples, judges)
    with_room = any(one.appends_last_targets for request in requests for one in request.passes)
    longer, is_last = await to_thread(append_last_targets, samples) if with_room else (samples, None)
    packed: dict[str, Batch] = {}
    found: dict[tuple[str, Want], Tensor] = {}
    next_values = None
    async with RankTasks(watch) as at_once:
        running = []
        for request in requests:
            role, judge = request.scorer[0], request.judge
            part, read = (None, None) if judge is None else (judge.part, judge.read)
            apart = role in packers.others or (part is not None and len(part) < samples.num_sequences)
            layout = role if apart or read is not None else ""
            if layout not in packed:
                pack = partial(packers.packed, samples, step, role, with_room=with_room, part=part)
                if judge is not None and read is not None:
                    pack = partial(packers.pack_untrained, read, role, judge.longest)
                packed[layout] = await to_thread(pack)
            request.batch = packed[layout]
            running.append(at_once.start(request.phases[0], _make_requests(roles, request)))
        for request, task in zip(requests, running, strict=True):
            assert request.batch is not None
            answers = await at_once.end_shared(task, request.seconds)
            for one, role, said in zip(request.passes, request.scorer, answers, strict=True):
                for what, scores in said.scores.items():
                    packed_from = request.read or (longer if one.appends_last_targets else samples)
                    column = await to_thread(unpack, request.batch, scores, packed_from)
                    if one.appends_last_targets and is_last is not None:
                        next_values = column[is_last] if what == "values" else next_values
                        column = column[~is_last]
                    found[role, what] = column
    return await to_thread(_with_columns, config, samples, found, next_values, judges)


def _requests(config: RunConfig, roles: RunComponents, samples: Samples, judges: Judges | None) -> list[_Request]:
    """Returns a request for each group of ranks or model in none, in the order of their first phases. Before them are
    those for other sequences: ranks keep what they hold of the step's until they are trained."""
    found: list[_Request] = []
    for phase, judge, one in _passes(config, roles, samples, judges):
        ranks = next((group for group in roles.shared_ranks if one.role in group.roles), None)
        together = (other for other in found if ranks is not None and other.ranks is ranks and other.read is None)
        request = next(together, None)
        if request is None:
            found.append(request := _Request(ranks=ranks, judge=judge))
        request.phases.append(phase)
        request.passes.append(one)
        request.scorer.append(one.role if judge is None else judge.role)
    return found


def _passes(
    config: RunConfig, roles: RunComponents, samples: Samples, judges: Judges | None
) -> Iterator[tuple[str, Judge | None, ForwardPass]]:
    """Yields the pass of each model, with the phase that it is counted for, and its judge."""
    section = config.algorithm
    wanted = policy_score_kinds(config)
    alone = section.is_own_critic and bool(samples.extra)  # the last targets have no extra columns
    both = section.is_own_critic and not alone
    of_reference: frozenset[Want] = LOGPROBS | {"top"} if section.needs_top else LOGPROBS
    asked = [
        (one, ForwardPass(role=one.model, outputs=of_reference)) for one in (() if judges is None else judges.judges)
    ]
    yield from (("reference", judge, one) for judge, one in asked if judge.read is not None)
    if wanted or both:
        want = wanted | _VALUES if both else wanted
        yield (
            "logprobs" if wanted else "values",
            None,
            ForwardPass(role="policy", outputs=want, replays_routes=True, appends_last_targets=both),
        )
    yield from (("reference", judge, one) for judge, one in asked if judge.read is None)
    if judges is None and "reference" in roles.models:
        yield "reference", None, ForwardPass(role="reference", outputs=of_reference)
    if alone or "critic" in roles.models:
        yield (
            "values",
            None,
            ForwardPass(role="policy" if alone else "critic", outputs=_VALUES, appends_last_targets=True),
        )


async def _make_requests(roles: RunComponents, request: _Request) -> Sequence[PassResult]:
    assert request.batch is not None
    if request.ranks is not None:
        return await request.ranks.score(request.batch, request.passes)
    (one,), began = request.passes, time.perf_counter()
    batch = for_pass(request.batch, replays=one.replays_routes, last_tokens=one.appends_last_targets)
    scores = await roles.models[one.role].score(batch, one.outputs)
    return [PassResult(scores=scores, seconds=time.perf_counter() - began)]


def _with_columns(
    config: RunConfig,
    samples: Samples,
    found: Mapping[tuple[str, Want], Tensor],
    next_values: Tensor | None,
    judges: Judges | None,
) -> ScoredSamples:
    section, current = config.algorithm, found.get(("policy", "logprobs"))
    if section.old_logprobs == "learner" and current is not None:
        samples = replace(samples, old_logprobs=current)
    columns: dict[str, Any] = {
        "ref_logprobs": found.get(("reference", "logprobs")),
        "ref_top": found.get(("reference", "top")),
        "old_values": found.get(("policy" if section.is_own_critic else "critic", "values")),
    }
    if judges is not None:
        columns |= judges.columns(found)
    samples = replace(samples, **{name: column for name, column in columns.items() if column is not None})
    return ScoredSamples(
        samples, {what: column for (role, what), column in found.items() if role == "policy"}, next_values
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedScores:
    """Scores texts by ``model``. ``packer`` packs for its ranks. Calls run one after the other: texts of one call alone
    share micro-batches, so their scores do not depend on what else is scored."""

    model: Scorer
    packer: Packer
    vocab_size: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text, which a micro-batch holds whole."""
        return self.packer.max_tokens

    async def __call__(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Raises DataError for a text that no micro-batch holds, and as `check_tokens` and `Scorer.score`."""
        samples = await to_thread(self._samples, texts)
        async with queued_slot(self.turn):
            batch = await to_thread(self.packer.pack, samples)
            said = await self.model.score(batch, frozenset({"values"}))
            await self.model.free_step()
        values = await to_thread(unpack, batch, said["values"], samples)
        return [float(value) for value in values[samples.mask]]

    def _samples(self, texts: Sequence[Sequence[int]]) -> Samples:
        rows = [scored_row("to score", ids) for ids in texts]
        check_tokens(rows, self.vocab_size)
        return supervised_samples(rows)
