"""The indexer of sparse attention in plain torch: what it computes of tokens, and the keys that it chooses.

Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1, and transformers ``deepseek_v32`` and ``glm_moe_dsa``.
Letters: N tokens, H hidden, R the rank of the queries' latent, I the indexer's heads, D the numbers of each, q queries
and L keys of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rl_megatron.models.operations import linear
from rl_megatron.models.rotary import as_halves
from rl_megatron.models.shape import Indexer

_NORM_EPS = 1e-6
_SCORES = 2**22  # float32 numbers of a block of scores on a CPU, over all heads that it sums together
_MORE = 64  # times as many on a GPU
_HIDDEN = torch.iinfo(torch.int64).min  # comes after every score


def index_queries(
    indexer: Indexer, latent: Tensor, hidden: Tensor, wq_b: Tensor, weights_proj: Tensor, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns rotated queries [N, I, D] in the dtype of ``latent``, and each head's weight [N, I] float32.

    Args:
        latent: The attention's queries [N, R] before their up projection, after their norm.
        hidden: The attention's input [N, H].
        wq_b: [I * D, R].
        weights_proj: [I, H], in float32 where published models have it so.
        angles: Cosines and sines [N, rope_dim / 2] of the tokens' positions, as attention itself has them.
    """
    query = linear(latent, wq_b).view(len(latent), indexer.heads, indexer.head_dim)
    scale = (indexer.heads * indexer.head_dim) ** -0.5
    weights = linear(hidden.to(weights_proj.dtype), weights_proj).float() * scale
    return _rotate(indexer, query, angles), weights


def index_keys(
    indexer: Indexer, hidden: Tensor, wk: Tensor, norm_weight: Tensor, norm_bias: Tensor, angles: tuple[Tensor, Tensor]
) -> Tensor:
    """Returns rotated keys [N, D], one for all heads, of ``hidden`` [N, H] and in its dtype, by ``wk`` [D, H] and the
    layer norm of ``norm_weight`` and ``norm_bias`` [D]. ``angles`` are those of `index_queries`."""
    sizes, wide = (indexer.head_dim,), linear(hidden, wk).float()
    key = functional.layer_norm(wide, sizes, norm_weight.float(), norm_bias.float(), _NORM_EPS)
    return _rotate(indexer, key[:, None], angles)[:, 0].to(hidden.dtype)


def _rotate(indexer: Indexer, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first numbers of each head of [N, heads, D]. Pairs come out as halves, which changes no product."""
    cos, sin = (angle[:, None].float() for angle in angles)
    turning, still = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = (as_halves(turning) if indexer.interleaved else turning).float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, still.float()), -1).to(x.dtype)


@torch.no_grad()
def choose_keys(query: Tensor, weights: Tensor, key: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Returns the ``min(top_k, L)`` visible keys with the highest scores, int32 [B, q, min(top_k, L)] in no order.

    A key's score is the sum over heads of weight * relu(query . key), in float32. Of equal scores it takes the first
    keys, whatever padding follows. Places for which a query has no visible key hold -1. Memory beyond the result is
    that of a block of scores.

    Args:
        query: [B, q, I, D].
        weights: [B, q, I] float32.
        key: [B, L, D].
        visible: [B or 1, q, L] bool, the keys that each query may choose.
        top_k: `Indexer.top_k`.
    """
    count, length = query.shape[1], key.shape[1]
    visible = visible.expand(len(query), -1, -1)
    if length <= top_k:
        places = torch.arange(length, dtype=torch.int32, device=key.device)
        return places.expand_as(visible).masked_fill(~visible, -1)
    out = torch.empty(*query.shape[:2], top_k, dtype=torch.int32, device=key.device)
    keys, room = key.float().mT, _SCORES if key.is_cpu else _MORE * _SCORES
    some = max(1, min(len(query), room // length))
    rows = max(1, min(count, room // (some * length)))
    for first in range(0, len(query), some):
        of_keys = keys[first : first + some]
        for start in range(0, count, rows):
            block = slice(first, first + some), slice(start, start + rows)
            out[block] = _best(_scores(query[block], weights[block], of_keys, room), visible[block], top_k)
    return out


def _scores(query: Tensor, weights: Tensor, keys: Tensor, room: int) -> Tensor:
    """[b, r, I, D], [b, r, I] and [b, D, L] -> [b, r, L] float32, summed over as many heads together as have room."""
    batch, rows, heads, _ = query.shape
    at_once = max(1, min(heads, room // (batch * rows * keys.shape[-1])))
    total = torch.zeros(batch, rows, keys.shape[-1], device=keys.device)
    for head in range(0, heads, at_once):
        part = slice(head, head + at_once)
        products = torch.bmm(query[:, :, part].float().flatten(1, 2), keys).relu_()
        products = products.view(batch, rows, -1, keys.shape[-1])
        total += (weights[:, :, None, part] @ products)[:, :, 0]
    return total


def _best(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Returns the places of the best visible scores, -1 where there are too few.

    Bits of a float32 sort as integers, with all but the sign flipped below 0. The place follows in lower bits, so the
    first of equal scores wins.
    """
    bits, length = scores.view(torch.int32), scores.shape[-1]  # a sum from 0.0 on is never -0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    ordered += torch.arange(length - 1, -1, -1, device=scores.device)
    best = ordered.masked_fill_(~visible, _HIDDEN).topk(top_k, sorted=False).values
    return torch.where(best == _HIDDEN, -1, length - 1 - (best & 0xFFFFFFFF)).to(torch.int32)
