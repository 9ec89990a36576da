"""Learner and servers that take turns: who releases its memory before whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from launcher.controller.group import WorkerGroup
from launcher.controller.learner import LearnerGroup
from launcher.servers.colocated import colocated
from launcher.worker.models import RankModels
from rl_megatron.interfaces import Roles, RolloutEngine, WeightSync
from rl_megatron.rollout.servers.weights import ReplicaWeights
from rl_megatron.types import Batch, Loss, ParallelDims


class Ranks:
    """The ranks of a role, which note the calls that come to them."""

    workers = ()

    def __init__(self, role: str, heard: list[str]) -> None:
        self.role, self.heard = role, heard

    async def each(self, name: str, *arguments: object) -> list[Any]:
        assert name in RankModels.CALLS
        self.heard.append(f"{self.role} {name}")
        return [None]

    async def ask(self, name: str, shares: object) -> list[Any]:
        self.heard.append(f"{self.role} {name}")
        return [{}]


class Servers:
    """All servers, and the push of weights into them."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    async def release(self) -> None:
        self.heard.append("servers release")

    async def push(self, version: int) -> None:
        self.heard.append(f"servers load {version}")

    async def export(self, folder: Path) -> None:
        self.heard.append(f"export {folder}")


def test_models_release_their_memory_before_a_push_and_servers_before_models_compute() -> None:
    heard: list[str] = []
    models = {role: LearnerGroup(cast(WorkerGroup, Ranks(role, heard)), ParallelDims(), role) for role in "abc"}
    servers = Servers(heard)
    roles = colocated(
        Roles(
            learners={"policy": models["a"], "critic": models["b"]},
            frozen={"reference": models["c"]},
            engine=cast(RolloutEngine, None),
            weights=cast(WeightSync, servers),
        ),
        cast(ReplicaWeights, servers),
    )
    batch = Batch(micro_batches=((),), sequences=((),), num_tokens=1, num_sequences=1)

    async def one_iteration() -> None:
        await roles.weights.push(1)
        await roles.frozen["reference"].score(batch, frozenset())
        await roles.policy.backward(batch, cast(Loss, None))
        await roles.learners["critic"].step(0.1)
        await roles.policy.release()
        await roles.weights.export(Path("x"))

    asyncio.run(one_iteration())
    assert heard == [
        *("a release", "b release", "c release", "servers load 1"),
        *("servers release", "c score", "servers release", "a backward", "servers release", "b step"),
        *("a release", "export x"),
    ]


def test_a_rank_returns_what_torch_keeps_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: heard.append("empty"))
    RankModels.release(cast(RankModels, None))
    assert heard == ["empty"]
