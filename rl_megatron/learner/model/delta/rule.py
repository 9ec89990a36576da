"""The gated delta rule over packed sequences, a chunk at a time, and the convolution before it.

Letters: T positions, n chunks of C, K key heads with R value heads each, dk and dv their sizes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_megatron.learner.model.delta.chunks import Chunks
from rl_megatron.learner.model.kernels.fused import from_slots, into_slots
from rl_megatron.models.delta import by_chunks


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """query, key [T, K, dk], value [T, K, R, dv], decay (the logarithm, at most 0) and beta [T, K, R] ->
    [T, K, R, dv] in float32 or more, by `by_chunks`."""
    q, k, v = (_laid_out(x, chunks).movedim(1, -2) for x in (query, key, value))
    g, b = (_laid_out(x, chunks).movedim(1, -1) for x in (decay, beta))
    out, _ = by_chunks(q, k, v, g, b, chunks.counts)  # [n, K, R, C, dv]
    return from_slots(out.permute(0, 3, 1, 2, 4).flatten(0, 1), chunks.slots)


def _laid_out(x: Tensor, chunks: Chunks) -> Tensor:
    """[T, ...] -> [n, C, ...], at least float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    out: Tensor = into_slots(wide, chunks.slots).unflatten(0, (-1, chunks.size))
    return out


def convolve(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """Each channel of [T, c] over the last positions of its sequence, by ``weight`` [c, 1, gap + 1]; then silu."""
    padded = x.new_zeros(chunks.places, x.shape[1]).index_copy(0, chunks.place, x)
    out = F.conv1d(padded.t()[None], weight, groups=len(weight))[0].t()
    return F.silu(out.index_select(0, chunks.place - chunks.gap))
