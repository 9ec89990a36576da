"""What each rank is sent of a batch, and that it is sent once a step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from launcher.controller.group import WorkerGroup
from launcher.controller.roles import LearnerGroup, Plane
from launcher.wire import messages
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.data.held import HeldRows
from rl_megatron.data.packing import pack
from rl_megatron.data.shares import Share
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import Pass
from rl_megatron.types import Batch, ParallelDims, Samples
from tests.samples import sequences_of

DIMS = ParallelDims(tp=2, pp=2, dp=2)
FIRST = (0, 2)  # rank of each data-parallel rank


class Rank:
    """A rank that has what its call's message brings."""

    def __init__(self, rank: int, of: Stages) -> None:
        self.rank, self._of = rank, of

    def call(self, name: str, *arguments: Any) -> Any:
        name, given = messages.unpack(messages.pack((name, arguments)))
        self._of.heard.append((name, self.rank))
        passes: Sequence[Pass] = ()
        if name in ("score", "backward"):
            passes, self._of.shares[self.rank], *_ = given
        last_stage = self.rank >= 4 and self.rank % 2 == 0
        scored = {"logprobs": [f"scores of {self.rank}"]} if last_stage else None
        return [(scored, float(self.rank)) for _ in passes]


class Stages:
    """Two pipeline stages of two data-parallel ranks of two tensor-parallel ranks, whose MoE layers alternate."""

    def __init__(self) -> None:
        self.shares: dict[int, Share | None] = {}
        self.heard: list[tuple[str, int]] = []
        self.workers = [Rank(rank, self) for rank in range(8)]

    async def each(self, name: str, role: str) -> list[tuple[int, ...]]:
        assert (name, role) == ("routed_layers", "policy")
        return [(0, 2)] * 4 + [(1, 3)] * 4

    def begin(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        return [self.workers[rank].call(name, *given) for rank, given in arguments.items()]

    async def gather(self, answers: list[Any]) -> list[Any]:
        return answers


def samples(num_layers: int | None = None) -> Samples:
    g, lengths = torch.Generator().manual_seed(0), torch.tensor([5, 3, 4, 6])
    n = int(lengths.sum())
    routes = {}
    if num_layers is not None:
        routes["routes"] = torch.randint(0, 8, (n, num_layers, 2), generator=g).to(torch.uint8)
    logprobs = -torch.rand(n, generator=g)
    return sequences_of(
        lengths,
        input_ids=torch.arange(n),
        targets=torch.arange(n) + 1,
        mask=torch.arange(n) % 3 > 0,
        advantages=torch.rand(n, generator=g),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs.clone(),
        **routes,
    )


def packed(whole: Samples) -> Batch:
    return pack(whole, dims=DIMS, max_tokens=6)


def learner_of(stages: Stages) -> LearnerGroup:
    group = cast(WorkerGroup, stages)
    return LearnerGroup(group, "policy", Plane(group, DIMS))


def score(given: Batch) -> Stages:
    stages = Stages()
    said = asyncio.run(learner_of(stages).score(given, frozenset({"logprobs"})))
    assert said == {"logprobs": [["scores of 4"], ["scores of 6"]]}
    return stages


def shares_of(stages: Stages) -> list[Share]:
    return [share for share in (stages.shares[rank] for rank in FIRST) if share is not None]


def test_the_first_rank_of_each_data_parallel_rank_is_sent_its_rows_and_the_others_nothing() -> None:
    given = packed(samples())
    stages = score(given)
    assert [rank for rank, share in stages.shares.items() if share is not None] == list(FIRST)
    for share, row in zip(shares_of(stages), given.micro_batches, strict=True):
        found = HeldRows().take(share)
        assert [m.input_ids.tolist() for m in found] == [m.input_ids.tolist() for m in row]


def test_a_rank_keeps_the_routes_of_its_own_layers() -> None:
    given = packed(samples(4))
    for share, row in zip(shares_of(score(given)), given.micro_batches, strict=True):
        for found, whole in zip(HeldRows().take(share, (1, 3)), row, strict=True):
            assert found.routes is not None
            assert whole.routes is not None
            assert torch.equal(found.routes, whole.routes[:, [1, 3]])


def test_routes_of_another_model_are_refused() -> None:
    with pytest.raises(RLMegatronError, match="have 3 MoE layers, but the learner's model has 4"):
        score(packed(samples(3)))


async def test_columns_are_sent_once_a_step_and_freed_at_its_end() -> None:
    """A pass over rows that ranks hold is their numbers; models on the same ranks share what these hold."""
    stages, whole = Stages(), samples()
    group = cast(WorkerGroup, stages)
    plane = Plane(group, DIMS)
    policy, critic = (LearnerGroup(group, "policy", plane) for _ in range(2))
    sent: list[list[int]] = []
    trained = packed(replace(whole, advantages=2 * whole.advantages))
    for model, batch in ((policy, packed(whole)), (critic, packed(whole))):
        await model.score(batch, frozenset({"logprobs"}))
        sent.append([len(share) for share in shares_of(stages)])
    for _ in range(2):
        await plane.call("backward", (), trained, CrossEntropy(), to_score=False)
        sent.append([len(share) for share in shares_of(stages)])
    await policy.forget()
    await critic.forget()
    first, second, loss, again = sent
    assert all(a < b for a, b in zip(second, first, strict=True))
    assert all(a < b for a, b in zip(again, loss, strict=True))
    assert [rank for name, rank in stages.heard if name == "forget"] == list(range(8))
    for share in shares_of(stages):
        with pytest.raises(RLMegatronError, match="which it was not sent"):
            HeldRows().take(share)


async def test_rows_are_freed_though_later_shares_could_not_be_computed() -> None:
    stages, whole = Stages(), packed(samples())
    learner = learner_of(stages)
    await learner.forget()
    assert not stages.heard
    await learner.score(whole, frozenset({"logprobs"}))
    with pytest.raises(IndexError):
        await learner.score(replace(whole, sequences=()), frozenset({"logprobs"}))
    await learner.forget()
    await learner.forget()
    assert [rank for name, rank in stages.heard if name == "forget"] == list(range(8))


async def test_passes_asked_at_once_find_what_the_one_before_brought() -> None:
    stages, whole = Stages(), packed(samples())
    learner = learner_of(stages)
    want = frozenset({"logprobs"})
    await asyncio.gather(*(learner.score(whole, want) for _ in range(2)))
    held = HeldRows()
    with pytest.raises(RLMegatronError, match=r"'input_ids' of rows 3 of batch 1, 1 in all, which it was not sent"):
        held.take(shares_of(stages)[0])
