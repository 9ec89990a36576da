"""Which pushes into engine servers are served: learner and replicas are a few lines, the packing is real."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rl_megatron.errors import ReplicasLost, SyncError
from rl_megatron.types import Batch, Completion, GenerationRequest, ParallelDims, Scores, WeightUpdate
from rl_megatron.weights.served import Probe, ServedWeights

PROBE = Probe.make(vocab_size=50, max_length=40, temperature=1.0, tolerance=1e-3)


class Both:
    """A learner for which every log-prob is -1, and a replica that is ``off`` in the first so many prompts."""

    def __init__(self, off: int, by: float) -> None:
        self.off, self.by, self.said = off, by, list[str]()
        self.is_stale = True

    async def push(self, version: int) -> WeightUpdate:
        return WeightUpdate(version=version, num_bytes=3, seconds=0.1, verify_seconds=0.0)

    async def export(self, folder: Path) -> None:
        raise NotImplementedError

    async def score(self, batch: Batch) -> Scores:
        return [[torch.full((len(m.input_ids),), -1.0) for m in row] for row in batch.micro_batches]

    def stale(self, name: str) -> bool:
        return self.is_stale

    async def load(self, path: Path, version: int, *, only: str | None = None) -> None:
        self.said.append(f"load {version}{only or ''}")

    async def sample_everywhere(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        return {"it": [[self._answer(-1.0 + (self.by if i < self.off else 0.0))] for i in range(len(requests))]}

    def _answer(self, logprob: float) -> Completion:
        return Completion(token_ids=(1, 2), logprobs=(-1.0, logprob), finish_reason="length", versions=(1, 1))

    async def commit(self, version: int, *, only: str | None = None) -> None:
        self.said.append(f"commit {version}{only or ''}")

    def refuse(self) -> None:
        self.said.append("refuse")


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize(
    ("off", "by", "served"),
    [(0, 0.0, True), (16, 5e-4, True), (2, 0.7, True), (3, 2e-3, False), (16, 0.7, False), (3, math.nan, False)],
    ids=["equal", "rounding", "near ties", "three prompts", "all", "not a number"],
)
def test_a_version_is_served_where_nearly_all_prompts_agree(
    tmp_path: Path, off: int, by: float, served: bool, dp: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"12345")
    both = Both(off, by)
    dims = ParallelDims(dp=dp)
    weights = ServedWeights(inner=both, path=path, replicas=both, learner=both, dims=dims, probe=PROBE)
    if served:
        assert asyncio.run(weights.push(4)).num_bytes == 8
    else:
        with pytest.raises(SyncError, match=rf"version 4 arrived wrong.*\n  it: .*nats.*, in {off} of 16 prompts"):
            asyncio.run(weights.push(4))
    assert both.said == ["load 4", "commit 4" if served else "refuse"]


@pytest.mark.parametrize(
    ("off", "by", "served"),
    [(0, 0.0, True), (16, 5e-4, True), (2, 0.7, True), (3, 2e-3, False), (16, 0.7, False), (3, math.nan, False)],
    ids=["equal", "rounding", "near ties", "three prompts", "all", "not a number"],
)
def test_a_server_that_came_back_must_answer_as_one_that_was_verified(
    tmp_path: Path, off: int, by: float, served: bool
) -> None:
    """The learner has moved on meanwhile: it is not asked."""

    async def test() -> None:
        both = Both(0, 0.0)
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"12345")
        weights = ServedWeights(inner=both, path=path, replicas=both, learner=both, dims=ParallelDims(), probe=PROBE)
        await weights.refit("it")
        assert both.said == []  # nothing is served yet
        await weights.push(4)
        both.said, both.off, both.by = [], off, by
        both.score = None  # type: ignore[assignment, method-assign]
        if served:
            await weights.refit("it")
        else:
            with pytest.raises(SyncError, match=rf"version 4 arrived wrong at it.*verified, in {off} of 16 prompts"):
                await weights.refit("it")
        assert both.said == ["load 4it", "commit 4it"][: 1 + served]
        both.said, both.is_stale = [], False
        await weights.refit("it")  # a push was faster
        assert both.said == []

    asyncio.run(test())


def test_a_push_of_which_all_servers_died_is_made_again(tmp_path: Path) -> None:
    async def test() -> None:
        both = Both(0, 0.0)
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"12345")
        weights = ServedWeights(inner=both, path=path, replicas=both, learner=both, dims=ParallelDims(), probe=PROBE)
        commit, deaths = both.commit, [ReplicasLost("killed"), ReplicasLost("killed again")]

        async def dying(version: int, *, only: str | None = None) -> None:
            if deaths:
                raise deaths.pop()
            await commit(version, only=only)

        both.commit = dying  # type: ignore[method-assign]
        await weights.push(4)
        assert both.said == ["load 4", "load 4", "load 4", "commit 4"]

    asyncio.run(test())
