"""Servers of evaluations take the served version from the mirror file, and later pushes pass them by."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import torch

from rl_megatron.errors import CorruptionError, ReplicasLost, SyncError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.servers.pinned import PinnedWeights
from rl_megatron.weights.servers.probe import Probe
from rl_megatron.weights.servers.sync import ServedWeights
from rl_megatron.weights.servers.trust import Trust
from tests.unit.weights.test_served_weights import Both, Straight


class Apart(Both):
    """Another replica, which loads the learner's file."""

    def __init__(self, folder: Path, learner: Both) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.mirror, self.there, self.dies = learner.mirror, ["it"], False

    def names(self) -> list[str]:
        return self.there

    async def commit(self, version: int, *, only: str | None = None) -> None:
        await super().commit(version, only=only)
        if self.dies:
            raise ReplicasLost("it died")


def pinned(folder: Path, both: Both, training: ServedWeights) -> tuple[PinnedWeights, Apart]:
    apart = Apart(folder / "apart", both)
    probe = Probe.make(vocab_size=50, max_length=40, temperature=1.0, tolerance=1e-3)
    apart.score = None  # type: ignore[assignment, method-assign]  # the learner may have trained on
    trust = Trust(path=both.mirror.path, servers=apart, learner=apart, dims=ParallelDims(), probe=probe)
    return PinnedWeights(training=training, path=both.mirror.path, servers=apart, trust=trust), apart


async def test_they_have_the_version_while_the_next_push_waits_and_keep_it(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        both = Both(tmp_path)
        training = both.weights()
        ours, apart = pinned(tmp_path, both, training)
        assert not await ours.pin(0, lambda: None)  # nothing is served yet
        await training.push(4)
        version = {name: tensor.clone() for name, tensor in both.mirror.tensors.items()}
        held = asyncio.Event()
        pinning = asyncio.create_task(ours.pin(4, held.set))
        await held.wait()
        assert not pinning.done()  # training goes on while they load
        pushing = asyncio.create_task(training.push(5))
        assert await pinning
        await pushing
        assert apart.said == ["load 4", "commit 4"]
        assert both.said == ["load 4", "commit 4", "load 5", "commit 5"]
        assert all(torch.equal(apart.params[name], tensor) for name, tensor in version.items())
        assert not await ours.pin(4, lambda: None)  # it is no longer served
        assert await ours.pin(5, lambda: None)


@pytest.mark.parametrize("packed", [False, True])
async def test_what_arrives_wrong_is_not_served_and_training_goes_on(tmp_path: Path, packed: bool) -> None:
    async with asyncio.timeout(30):
        both = Both(tmp_path)
        both.packed = packed
        training = both.weights()
        ours, apart = pinned(tmp_path, both, training)
        apart.packed = packed
        await training.push(4)
        assert await ours.pin(4, lambda: None)
        await training.push(5)
        apart.said, apart.flipped = [], "norm"
        with pytest.raises(CorruptionError, match=r"wrote in norm$"):
            await ours.pin(5, lambda: None)
        assert apart.said == ["load 5", "refuse"]
        apart.flipped, apart.off, apart.by = "", 4, 0.7
        if packed:  # else checksums say all
            with pytest.raises(SyncError, match=r"version 5 arrived wrong at it.*verified"):
                await ours.pin(5, lambda: None)
        await training.push(6)
        assert both.said[-1] == "commit 6"


async def test_without_servers_there_is_no_evaluation_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(30):
        both = Both(tmp_path)
        training = both.weights()
        ours, apart = pinned(tmp_path, both, training)
        await training.push(4)
        apart.there = []
        assert not await ours.pin(4, lambda: None)
        assert not apart.said
        apart.there, apart.dies = ["it"], True
        with caplog.at_level(logging.WARNING):
            assert not await ours.pin(4, lambda: None)
        assert apart.said[-1] == "refuse"
        await training.push(5)
    assert "it died" in caplog.text


async def test_what_went_straight_into_training_s_servers_is_written_for_them_while_the_learner_has_it(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(30):
        both = Both(tmp_path)
        training, straight = both.weights(), Straight(both)
        training._delivery = straight
        ours, apart = pinned(tmp_path, both, training)
        await training.push(4)
        assert await ours.pin(4, lambda: None)
        assert straight._rendezvous is not None  # training's servers go on with their group
        both.moved_on, apart.said = 1, []
        assert not await ours.pin(4, lambda: None)  # a step of the optimizer came first
        assert not apart.said
