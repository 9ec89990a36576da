"""Which part of a batch each rank is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from launcher.controller.group import WorkerGroup
from launcher.controller.learner import LearnerGroup
from rl_megatron.errors import RLMegatronError
from rl_megatron.types import Batch, ParallelDims, Samples


@dataclass
class Worker:
    rank: int


class Stages:
    """Two pipeline stages of two data-parallel ranks each, whose MoE layers alternate, as with virtual stages."""

    workers = tuple(map(Worker, range(4)))
    routed = ((0, 2), (0, 2), (1, 3), (1, 3))

    def __init__(self) -> None:
        self.sent: dict[int, tuple[Samples, ...]] = {}

    async def each(self, name: str, role: str) -> list[tuple[int, ...]]:
        assert (name, role) == ("routed_layers", "policy")
        return list(self.routed)

    async def ask(self, name: str, arguments: Mapping[int, Any]) -> list[Any]:
        self.sent = {rank: given[1] for rank, given in arguments.items()}
        return [None, None, {"logprobs": ["scores of 0"]}, {"logprobs": ["scores of 1"]}]


def batch(num_layers: int | None) -> Batch:
    def samples(seed: int) -> Samples:
        g, n = torch.Generator().manual_seed(seed), 5
        routes = None if num_layers is None else torch.randint(0, 8, (n, num_layers, 2), generator=g).to(torch.uint8)
        zeros, ids = torch.zeros(n), torch.arange(n)
        return Samples(
            input_ids=ids,
            targets=ids,
            mask=ids > 1,
            advantages=zeros,
            rollout_logprobs=zeros,
            old_logprobs=zeros,
            routes=routes,
            cu_seqlens=torch.tensor([0, n]),
        )

    rows = tuple((samples(2 * d), samples(2 * d + 1)) for d in range(2))
    sequences = tuple(tuple(torch.zeros(1, dtype=torch.int64) for _ in row) for row in rows)
    return Batch(micro_batches=rows, sequences=sequences, num_tokens=12, num_sequences=4)


def score(given: Batch) -> dict[int, tuple[Samples, ...]]:
    stages = Stages()
    learner = LearnerGroup(cast(WorkerGroup, stages), ParallelDims(pp=2, dp=2), "policy")
    said = asyncio.run(learner.score(given, frozenset({"logprobs"})))
    assert said == {"logprobs": [["scores of 0"], ["scores of 1"]]}
    return stages.sent


def test_a_stage_gets_the_routes_of_its_own_layers() -> None:
    given = batch(4)
    sent = score(given)
    for rank, row in sent.items():
        for found, whole in zip(row, given.micro_batches[rank % 2], strict=True):
            assert found.routes is not None
            assert whole.routes is not None
            assert torch.equal(found.routes, whole.routes[:, list(Stages.routed[rank])])
            assert replace(found, routes=whole.routes) == whole


def test_what_has_no_routes_is_sent_as_it_is() -> None:
    given = batch(None)
    assert all(row is given.micro_batches[rank % 2] for rank, row in score(given).items())


def test_routes_of_another_model_are_refused() -> None:
    with pytest.raises(RLMegatronError, match="have 3 MoE layers, but the learner's model has 4"):
        score(batch(3))
