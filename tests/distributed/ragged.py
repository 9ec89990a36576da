"""Samples of unlike lengths, for tests that compare layouts of the learner."""

from __future__ import annotations

import torch

from rl_megatron.types import Samples
from tests.samples import sequences_of


def ragged_samples(count: int, g: torch.Generator) -> Samples:
    """``count`` sequences, the first two targets of each masked out; advantages and log-probs are 0."""
    lengths = torch.randint(4, 40, (count,), generator=g)
    n = int(lengths.sum())
    position = torch.arange(n) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return sequences_of(
        lengths,
        input_ids=torch.randint(0, 256, (n,), generator=g),
        targets=torch.randint(0, 256, (n,), generator=g),
        mask=position >= 2,
    )
