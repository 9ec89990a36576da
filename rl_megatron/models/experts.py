"""The mixture of experts of a decoder layer: every expert on every token, or only the chosen ones.

Letters: N tokens, H hidden, E experts, I expert width, k experts a token, C the most tokens any expert got.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Below this waste of dense products, the gathering of `padded_experts` takes longer than it saves. Two Zen 5 cores
# cross over at 4 to 7 MFLOP, for hidden 64 to 512 and 8 to 32 experts.
MAX_DENSE_WASTE_FLOPS = 5e6
# Padded rows over real rows up to which two batched products beat a loop over experts.
MAX_PADDING = 1.5


def mix_experts(
    residual: Tensor,
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    experts_per_token: int,
    normalize: bool,
) -> Tensor:
    """``residual`` [N, H] plus the chosen experts' outputs on ``x`` [N, H], weighted by the router's probabilities.

    ``router_logits`` [N, E]; ``w13`` [E, 2I, H] (gate, then up); ``w2`` [E, H, I]. ``normalize`` makes the chosen
    probabilities of a token sum to one.
    """
    if normalize:  # softmax over the chosen equals the chosen of the softmax, renormalised
        top, chosen = router_logits.topk(experts_per_token, dim=-1)
        weights = top.softmax(-1, dtype=torch.float32)
    else:
        weights, chosen = router_logits.softmax(-1, dtype=torch.float32).topk(experts_per_token, dim=-1)
    wasted_flops = 2 * len(x) * (w13.shape[0] - experts_per_token) * (w13[0].numel() + w2[0].numel())
    path = all_experts if wasted_flops <= MAX_DENSE_WASTE_FLOPS else padded_experts
    return path(residual, x, chosen, weights.to(x.dtype), w13, w2)


def all_experts(residual: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Two dense products over all E experts, the unchosen weighted by zero. For few tokens: least overhead.

    ``chosen`` and ``weights`` [N, k].
    """
    num, experts, width = len(x), w13.shape[0], w2.shape[2]
    gate_up = functional.linear(x, w13.view(-1, x.shape[1])).view(num, experts, 2, width)
    active = functional.silu(gate_up[:, :, 0]).mul_(gate_up[:, :, 1])
    active.mul_(weights.new_zeros(num, experts).scatter_(1, chosen, weights).unsqueeze(-1))
    return torch.addmm(residual, active.view(num, -1), w2.permute(0, 2, 1).reshape(-1, w2.shape[1]))


def padded_experts(residual: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Tokens gathered by expert, C rows each (the short ones padded), then two batched products of E matrices."""
    (num, k), (experts, _, _) = chosen.shape, w13.shape
    expert_of_pair, order = chosen.reshape(-1).sort(stable=True)
    counts = torch.bincount(expert_of_pair, minlength=experts)
    most = int(counts.max())
    if experts * most > MAX_PADDING * num * k:
        return _unpadded(residual, x, order, counts, weights, w13, w2)
    # Sorted pair i is number (i - the first pair of its expert) among the C rows of its expert.
    shift = torch.arange(0, experts * most, most, device=x.device) + counts - counts.cumsum(0)
    row = torch.arange(num * k, device=x.device) + shift.index_select(0, expert_of_pair)
    token_of_row = order.new_zeros(experts * most).scatter_(0, row, order // k)
    row_of_pair = torch.empty_like(order).scatter_(0, order, row)
    gathered = x.index_select(0, token_of_row).view(experts, most, -1)
    out = torch.bmm(_gated(torch.bmm(gathered, w13.transpose(1, 2))), w2.transpose(1, 2))
    return _combine(residual, out.view(experts * most, -1).index_select(0, row_of_pair), weights)


def _unpadded(
    residual: Tensor, x: Tensor, order: Tensor, counts: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
) -> Tensor:
    """One product pair per expert, over exactly its tokens: for routers so uneven that padding would dominate."""
    gathered = x.index_select(0, order // weights.shape[1])
    out = torch.empty_like(gathered)
    sizes = counts.tolist()
    for rows, target, up, down in zip(gathered.split(sizes), out.split(sizes), w13, w2, strict=True):
        torch.mm(_gated(torch.mm(rows, up.t())), down.t(), out=target)
    return _combine(residual, torch.empty_like(out).index_copy_(0, order, out), weights)


def _gated(gate_up: Tensor) -> Tensor:
    """SwiGLU: [..., 2I] -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _combine(residual: Tensor, out_of_pair: Tensor, weights: Tensor) -> Tensor:
    """Adds the weighted sum over each token's k outputs, [N * k, H], to ``residual`` [N, H]."""
    num, k = weights.shape
    outputs, total = out_of_pair.view(num, k, -1), residual
    for choice in range(k):  # a batched product of N such small matrices takes five times as long at H = 64
        total = torch.addcmul(total, outputs[:, choice], weights[:, choice, None])
    return total
