"""Messages between the processes of a group, over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from rl_megatron.errors import SyncError
from rl_megatron.weights.transports import words
from tests.distributed.ranks import run_ranks


def rank_main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert words.gather(f"of {rank}", None) == ["of 0", "of 1"]
    if rank == 1:
        os._exit(0)
    with pytest.raises(SyncError, match="a process of the group was lost: "):
        words.gather("anybody there?", None)
    os._exit(0)


def test_a_process_that_is_lost_is_told_as_a_sync_that_failed(tmp_path: Path) -> None:
    run_ranks(rank_main, 2, tmp_path)
