"""Asks all models of a run for their scores of a step's samples, before any of them changes.

Samples are packed once for each layout. Models on the same ranks get them by one request, which asks for all columns:
those of one model by one pass. A teacher with a prompt of its own reads other sequences, by a request for them alone.
Letters: N positions of the samples, S sequences.
"""

from __future__ import annotations

import time
from asyncio import to_thread
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.config.beside import longest_read
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer, packer_of, unpack
from rl_megatron.data.samples import seen_by, with_last_tokens
from rl_megatron.interfaces import Pass, PassScores, Roles, Together
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.seeds import seed_of
from rl_megatron.training.measures import LOGPROBS, Measured, wanted_of_policy
from rl_megatron.training.scores.teachers import as_sampled, judged_by, one_reference, read_by
from rl_megatron.training.tasks import AtOnce
from rl_megatron.types import Batch, RolloutGroup, Samples, Want

RankOf: TypeAlias = NDArray[np.int64]
"""The data-parallel rank of each sequence [S]."""

_VALUES: frozenset[Want] = frozenset({"values"})


@dataclass(slots=True, kw_only=True)
class Packers:
    """How each role's batches are packed: for the learner's layout, or for one of the role's own."""

    config: RunConfig
    attention_cost: float
    unit: int = 1
    own: Packer = field(init=False)
    others: Mapping[str, Packer] = field(init=False)

    def __post_init__(self) -> None:
        whole = self.config.train.whole_groups
        make = partial(packer_of, attention_cost=self.attention_cost, unit=self.unit, whole_groups=whole)
        self.own = make(self.config.learner)
        self.others = {role: make(self.config.learner_of(role)) for role in self.config.roles.layouts}

    def packed(
        self,
        samples: Samples,
        step: int,
        role: str = "policy",
        *,
        with_room: bool = False,
        part: NDArray[np.int64] | None = None,
    ) -> Batch:
        """All sequences, or ``part``. Those of a role that is trained are where it is trained on them first, so that
        their columns are there once they were scored. ``with_room`` is that of `Packer.pack`."""
        packer = self.others.get(role, self.own)
        if part is not None and len(part) < samples.num_sequences:
            return packer.pack(samples, part=part, with_room=with_room)
        most, seed = self.config.train.minibatches, seed_of(self.config.seed, step, 0)
        is_trained = packer is self.own or role == "critic"
        ranks: RankOf | None = packer.ranks(samples, most=most, seed=seed) if is_trained else None
        return packer.pack(samples, ranks=ranks, with_room=with_room)

    def apart(self, samples: Samples, role: str) -> Batch:
        """All sequences of samples that nobody trains on; what a server reads may be longer than a micro-batch here."""
        packer, longest = self.others.get(role, self.own), longest_read(self.config, role)[1]
        return replace(packer, max_tokens=max(packer.max_tokens, longest)).pack(samples)

    def again(self, role: str, batch: Batch) -> Batch:
        """The batch for the ranks of ``role``, packed again if they have a layout of their own."""
        other = self.others.get(role)
        return batch if other is None else other.again(batch)


@dataclass(slots=True, kw_only=True)
class _Request:
    """Passes over one batch, with the phase that each is counted for, and who says it; ``ranks`` make them all.
    ``read``: the sequences, where they are not the step's samples."""

    ranks: Together | None
    read: Samples | None = None
    phases: list[str] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    told_by: list[str] = field(default_factory=list)
    batch: Batch | None = None

    def seconds(self, said: Sequence[PassScores]) -> dict[str, float]:
        """Seconds that the answered passes took, added up by phase."""
        found = dict.fromkeys(self.phases, 0.0)
        for phase, one in zip(self.phases, said, strict=True):
            found[phase] += one.seconds
        return found


async def measured(
    config: RunConfig,
    roles: Roles,
    packers: Packers,
    samples: Samples,
    step: int,
    watch: Stopwatch,
    *,
    groups: Sequence[RolloutGroup],
) -> Measured:
    """The samples, which are of ``groups``, with all scores that the algorithm needs, and no others."""
    judged = judged_by(config, samples)
    read = await to_thread(read_by, config, judged, groups)
    requests = _requests(config, roles, samples, judged, read)
    with_room = any(one.last_tokens for request in requests for one in request.passes)
    longer, is_last = await to_thread(with_last_tokens, samples) if with_room else (samples, None)
    packed: dict[str, Batch] = {}
    found: dict[tuple[str, Want], Tensor] = {}
    next_values = None
    async with AtOnce(watch) as at_once:
        running = []
        for request in requests:
            role = request.told_by[0]
            part = judged.get(role)
            apart = role in packers.others or (part is not None and len(part) < samples.num_sequences)
            layout = role if apart or request.read is not None else ""
            if layout not in packed:
                pack = partial(packers.packed, samples, step, role, with_room=with_room, part=part)
                if request.read is not None:
                    pack = partial(packers.apart, request.read, role)
                packed[layout] = await to_thread(pack)
            request.batch = packed[layout]
            running.append(at_once.begin(request.phases[0], _asked(roles, request)))
        for request, task in zip(requests, running, strict=True):
            assert request.batch is not None
            answers = await at_once.end_shared(task, request.seconds)
            for one, role, said in zip(request.passes, request.told_by, answers, strict=True):
                for what, scores in said.scores.items():
                    packed_from = request.read or (longer if one.last_tokens else samples)
                    column = await to_thread(unpack, request.batch, scores, packed_from)
                    if request.read is not None:
                        column = await to_thread(as_sampled, column, request.read, samples, judged[role])
                    if one.last_tokens and is_last is not None:
                        next_values = column[is_last] if what == "values" else next_values
                        column = column[~is_last]
                    found[role, what] = column
    return _with_columns(config, samples, found, next_values, judged)


def _requests(
    config: RunConfig, roles: Roles, samples: Samples, judged: Collection[str], read: Mapping[str, Samples]
) -> list[_Request]:
    """One for each group of ranks, and one for each model that is in none, in the order of their first phases. Before
    them those for other sequences: what ranks hold of the step's they keep until they are trained."""
    found: list[_Request] = []
    itself = "reference" if config.algorithm.taught_by_average else "policy"
    for role, sequences in read.items():
        one = Pass(role=role if role in roles.models else itself, want=_of_reference(config))
        ranks = next((group for group in roles.together if one.role in group.roles), None)
        found.append(_Request(ranks=ranks, read=sequences, phases=["reference"], passes=[one], told_by=[role]))
    for phase, one in _passes(config, roles, samples, [role for role in judged if role not in read]):
        ranks = next((group for group in roles.together if one.role in group.roles), None)
        together = (request for request in found if ranks is not None and request.ranks is ranks)
        request = next((request for request in together if request.read is None), None)
        if request is None:
            found.append(request := _Request(ranks=ranks))
        request.phases.append(phase)
        request.passes.append(one)
        request.told_by.append(one.role)
    return found


def _of_reference(config: RunConfig) -> frozenset[Want]:
    return LOGPROBS | {"top"} if config.algorithm.needs_top else LOGPROBS


def _passes(config: RunConfig, roles: Roles, samples: Samples, judged: Collection[str]) -> Iterator[tuple[str, Pass]]:
    """What each model is asked, and the phase that it is counted for. ``judged``: the roles of teachers that read the
    policy's prompts."""
    section = config.algorithm
    wanted = wanted_of_policy(config)
    alone = section.is_own_critic and bool(samples.extra)  # which the last targets do not have
    both = section.is_own_critic and not alone
    if wanted or both:
        want = wanted | _VALUES if both else wanted
        yield "logprobs" if wanted else "values", Pass(role="policy", want=want, replays=True, last_tokens=both)
    for role in judged if section.kl.teachers else ("reference",):
        if role in roles.models:
            yield "reference", Pass(role=role, want=_of_reference(config))
    if alone or "critic" in roles.models:
        yield "values", Pass(role="policy" if alone else "critic", want=_VALUES, last_tokens=True)


async def _asked(roles: Roles, request: _Request) -> Sequence[PassScores]:
    assert request.batch is not None
    if request.ranks is not None:
        return await request.ranks.score(request.batch, request.passes)
    (one,), began = request.passes, time.perf_counter()
    batch = seen_by(request.batch, replays=one.replays, last_tokens=one.last_tokens)
    scores = await roles.models[one.role].score(batch, one.want)
    return [PassScores(scores=scores, seconds=time.perf_counter() - began)]


def _with_columns(
    config: RunConfig,
    samples: Samples,
    found: Mapping[tuple[str, Want], Tensor],
    next_values: Tensor | None,
    judged: Mapping[str, NDArray[np.int64]],
) -> Measured:
    section, current = config.algorithm, found.get(("policy", "logprobs"))
    if section.old_logprobs == "learner" and current is not None:
        samples = replace(samples, old_logprobs=current)
    columns: dict[str, Any] = {
        "ref_logprobs": found.get(("reference", "logprobs")),
        "ref_top": found.get(("reference", "top")),
        "old_values": found.get(("policy" if section.is_own_critic else "critic", "values")),
    }
    if judged:
        columns |= one_reference(section.kl.teachers, judged, found, samples)
    samples = replace(samples, **{name: column for name, column in columns.items() if column is not None})
    return Measured(samples, {what: column for (role, what), column in found.items() if role == "policy"}, next_values)
