"""Log-probs over the tokens that sampling kept: the limit of a micro-batch's logits.

A policy, its old version and its reference have one support, as in DeepSeek-V3.2 ("keep sampling mask",
arXiv:2512.02556): an importance ratio, or a KL, of other supports would be that of other distributions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.columns import Ragged
from rl_megatron.learner.heads import LEFT_OUT, Limit
from rl_megatron.learner.packed import PackedMicroBatch


def limit(micro_batch: PackedMicroBatch, vocab_start: int) -> Limit | None:
    """Returns what leaves out the tokens that sampling did not keep; None for a micro-batch without the column.

    A position without kept tokens has the whole vocabulary. Extra memory of a call is that of a bool for each logit of
    the chunk, and of a few int64 for each of its kept tokens. On a GPU it waits once a micro-batch.
    """
    kept = micro_batch.extra.get("kept")
    if not isinstance(kept, Ragged):
        return None
    counts, ends = kept.counts, [0, *kept.counts.cumsum(0).tolist()]

    def leave_out(logits: Tensor, positions: slice) -> None:
        first, stop, _ = positions.indices(len(counts))
        here, width = counts[first:stop], logits.shape[1]
        row = torch.arange(len(here), device=logits.device)
        row = row.repeat_interleave(here, output_size=ends[stop] - ends[first])
        column = kept.values[ends[first] : ends[stop]].long() - vocab_start
        out = (here > 0)[:, None].repeat(1, width + 1)  # the last column takes tokens of other ranks
        out[row, column.where((column >= 0) & (column < width), width)] = False
        logits.masked_fill_(out[:, :width], LEFT_OUT)

    return leave_out
