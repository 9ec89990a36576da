"""Samples of unlike lengths, for tests that compare layouts of the learner."""

from __future__ import annotations

import torch

from rl_megatron.types import Samples


def ragged_samples(count: int, g: torch.Generator) -> Samples:
    """``count`` sequences, the first two targets of each masked out; advantages and log-probs are 0."""
    lengths = torch.randint(4, 40, (count,), generator=g)
    n = int(lengths.sum())
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    position = torch.arange(n) - torch.repeat_interleave(cu[:-1], lengths)
    return Samples(
        input_ids=torch.randint(0, 256, (n,), generator=g),
        targets=torch.randint(0, 256, (n,), generator=g),
        mask=position >= 2,
        advantages=torch.zeros(n),
        rollout_logprobs=torch.zeros(n),
        old_logprobs=torch.zeros(n),
        cu_seqlens=cu,
    )
