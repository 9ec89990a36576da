"""What the controller would send a rank of given micro-batches, for tests that call a rank's process directly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_megatron.data.rows import Sent, Share
from rl_megatron.types import Batch, ParallelDims, Samples


def share_of(row: Sequence[Samples], dims: ParallelDims, rank: int, *, to_score: bool) -> Share | None:
    """Of its data-parallel rank's micro-batches; None for the ranks that the first of them passes it on to."""
    if rank != dims.dp_rank(rank) * dims.tp * dims.cp:
        return None
    columns = {name: torch.cat([m.columns[name] for m in row]) for name in row[0].columns}
    lengths = torch.cat([m.cu_seqlens.diff() for m in row])
    samples = Samples(**columns, cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    sequences = torch.arange(len(lengths)).split([m.num_sequences for m in row])
    batch = Batch(samples=samples, sequences=(sequences,), micro_batches=(row,), num_tokens=0, num_sequences=0)
    return Sent(1).shares(batch, to_score=to_score)[0]
