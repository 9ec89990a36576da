"""Samples from plain columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_megatron.types import Samples


def sequences_of(lengths: Sequence[int] | Tensor, **columns: Tensor) -> Samples:
    """Sequences of ``lengths``, one after the other. Of the columns that samples always have, those not given are
    zeros, and every position is trained on."""
    ends = torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)
    num = int(ends[-1]) if len(ends) else 0
    always = {name: torch.zeros(num) for name in ("advantages", "rollout_logprobs", "old_logprobs")}
    always |= {name: torch.zeros(num, dtype=torch.int64) for name in ("input_ids", "targets")}
    always["mask"] = torch.ones(num, dtype=torch.bool)
    return Samples(**always | columns, cu_seqlens=torch.cat([ends.new_zeros(1), ends]))


TWO = (13, 22)  # tokens of two sequences that are packed


def two_sequences() -> Samples:
    """Of random tokens of the tiny models of families, with advantages."""
    g, n = torch.Generator().manual_seed(5), sum(TWO)
    return sequences_of(
        TWO,
        input_ids=torch.randint(0, 61, (n,), generator=g),
        targets=torch.randint(0, 61, (n,), generator=g),
        advantages=torch.randn(n, generator=g),
    )
