"""Reduce-scatter and all-gather of buffers between ranks on CPUs, in place and beside, through memory that
they share or by sends."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.distributed.ranks import run_ranks

SHARD, ROUNDS = 40, 10  # a shard is exchanged in pieces of 64 bytes at most


def rank_main(rank: int, size: int, memory: str, folder: Path) -> None:
    from rl_megatron.learner.cpu import exchange

    exchange.NODE_MEMORY = folder / str(rank) if memory == "apart" else folder / "memory"
    exchange.NODE_MEMORY.mkdir(exist_ok=True)
    exchange.SHARED_BYTES = 1 << 60 if memory == "no room" else 64 * 2 * size**2
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size + 1)
    group = dist.new_group([*range(1, size + 1)])  # whose ranks have other numbers in the world
    if rank:
        for number in range(ROUNDS):
            check(group, together(exchange.reduce_scatter), together(exchange.all_gather), number)
        assert (exchange._shared_by(group) is not None) is (memory == "shared" and size > 1)
        assert not [*exchange.NODE_MEMORY.iterdir()]
    dist.barrier()
    dist.destroy_process_group()
    del group
    gc.collect()
    assert not exchange._SHARED  # another world's ranks share other memory


def together(call: Any) -> Any:
    """As megatron calls it for several buckets, which has torch put all-reduces and gathers off until the end."""

    def calls(*buffers: torch.Tensor, group: dist.ProcessGroup) -> None:
        with _coalescing_manager(group, async_ops=False):
            call(*buffers, group=group)

    return calls


def check(group: dist.ProcessGroup, reduce_scatter: Any, all_gather: Any, number: int) -> None:
    size, mine = group.size(), group.rank()
    numbers = torch.arange(size * SHARD, dtype=torch.float32) + number
    for in_place in (True, False):
        buffer = numbers * 10.0**mine
        own = buffer.chunk(size)[mine] if in_place else torch.empty(SHARD)
        reduce_scatter(own, buffer, group=group)
        wanted = numbers.chunk(size)[mine] * sum(10.0**rank for rank in range(size))
        assert torch.equal(own, wanted)
        whole = torch.full((size * SHARD,), -1.0)
        if in_place:
            own = whole.chunk(size)[mine].copy_(own)
        all_gather(whole, own, group=group)
        assert torch.equal(whole, numbers * sum(10.0**rank for rank in range(size)))


@pytest.mark.parametrize(
    ("size", "memory"), [(1, "shared"), (2, "shared"), (3, "shared"), (3, "apart"), (2, "no room")]
)
def test_each_rank_gets_its_shards_sum_and_all_get_all_shards(size: int, memory: str, tmp_path: Path) -> None:
    run_ranks(rank_main, size + 1, size, memory, tmp_path)
