"""Reduce-scatter and all-gather of buffers between ranks on CPUs, in place and beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks

SHARD = 5


def rank_main(rank: int, size: int, folder: Path) -> None:
    from rl_megatron.learner.cpu import all_gather, reduce_scatter

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size + 1)
    group = dist.new_group([*range(1, size + 1)])  # whose ranks have other numbers in the world
    if rank:
        exchange(group, reduce_scatter, all_gather)
    dist.barrier()
    dist.destroy_process_group()


def exchange(group: dist.ProcessGroup, reduce_scatter: object, all_gather: object) -> None:
    assert callable(reduce_scatter)
    assert callable(all_gather)
    size, mine = group.size(), group.rank()
    numbers = torch.arange(size * SHARD, dtype=torch.float32)
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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_gets_its_shards_sum_and_all_get_all_shards(size: int, tmp_path: Path) -> None:
    run_ranks(rank_main, size + 1, size, tmp_path)
