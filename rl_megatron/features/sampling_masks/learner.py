"""Log-probs over the tokens that sampling kept of a micro-batch's logits.

A policy, its old version and its reference have one support, as in DeepSeek-V3.2 ("keep sampling mask",
arXiv:2512.02556): an importance ratio, or a KL, of other supports would be that of other distributions.
"""

from __future__ import annotations

import torch

from rl_megatron.columns import Ragged
from rl_megatron.learner.heads import Kept
from rl_megatron.learner.packed import PackedMicroBatch


def kept_tokens(micro_batch: PackedMicroBatch, vocab: range) -> Kept | None:
    """Returns the tokens that sampling kept of this rank's rows ``vocab``; None for a micro-batch without the column.

    A position without kept tokens has the whole vocabulary. On a GPU it waits a few times a micro-batch.
    """
    kept = micro_batch.extra.get("kept")
    if not isinstance(kept, Ragged):
        return None
    positions = torch.arange(len(kept.counts), device=kept.counts.device)
    positions = positions.repeat_interleave(kept.counts, output_size=len(kept.values))
    return Kept.of(positions, kept.values.long(), kept.counts > 0, vocab)
