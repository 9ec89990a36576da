"""What a process serves between the phases of a commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.types import ParallelDims, WeightUpdate
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import plan
from rl_megatron.weights.transports.commit import Staging
from rl_megatron.weights.transports.process_group import ProcessGroupTransport
from tests.distributed.test_transport import hf_tensors, megatron_tensors
from tests.small_models import SMALL_MOE


@dataclass
class Engine:
    version: int | None = 7

    def withdraw(self) -> None:
        self.version = None

    def serve(self, version: int) -> None:
        self.version = version


@pytest.fixture(autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one_process() -> tuple[Staging, Engine]:
    moves = plan(Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE), Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE))
    src = megatron_tensors(hf_tensors(0), ParallelDims(), 0)
    transport, engine = ProcessGroupTransport(moves, src=src, dst=hf_tensors(1)), Engine()
    return Staging(transport, engine), engine


def test_a_version_is_served_from_its_commit_and_nothing_while_it_is_staged() -> None:
    staging, engine = one_process()
    staging.stage(8)
    assert engine.version is None
    staging.commit(8)
    assert engine.version == 8


def test_what_was_not_staged_is_not_committed() -> None:
    staging, _ = one_process()
    with pytest.raises(SyncError, match="version 8 cannot be committed, because what is staged here is nothing"):
        staging.commit(8)
    staging.stage(9)
    with pytest.raises(SyncError, match="is version 9"):
        staging.commit(8)


class Torn:
    """A transport that fails at its second version."""

    def __init__(self) -> None:
        self.moved = 0

    def move(self, version: int) -> WeightUpdate:
        self.moved += 1
        if self.moved == 2:
            raise CorruptionError(f"version {version} did not arrive whole")
        return WeightUpdate(version=version, num_bytes=0, seconds=0.0)

    def close(self) -> None: ...


def test_a_failed_version_takes_the_staged_one_with_it_and_serves_nothing() -> None:
    engine = Engine()
    staging = Staging(Torn(), engine)
    staging.stage(8)
    with pytest.raises(CorruptionError):
        staging.stage(9)
    for version in (8, 9):
        with pytest.raises(SyncError, match="is nothing"):
            staging.commit(version)
    assert engine.version is None
    staging.stage(9)
    staging.commit(9)
    assert engine.version == 9
