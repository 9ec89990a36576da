"""The part of a decoder layer after its attention, in plain torch: one MLP, or experts that a router chooses.

It computes every expert on every token, or only the chosen ones.
Letters: N tokens, H hidden, E experts, I expert width, k experts a token, C rows of each expert in the grouped product.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from math import inf
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rl_megatron.models.attention import Zeros
from rl_megatron.models.operations import HAS_ONEDNN, ONEDNN_LEADS, linear
from rl_megatron.models.shape import ExpertNames, ModelShape, Router

# Below this waste of dense products, the gathering of `grouped_experts` takes longer than it saves. Two Zen 5 cores
# cross over at 10 to 14 MFLOP, for hidden 64 to 256 and 8 to 32 experts.
MAX_DENSE_WASTE_FLOPS = 12e6
# Costs of an expert's products outside the grouped product, where a flop of that one costs 1: of the two calls, and of
# a flop.
OVERFLOW_FLOPS, OVERFLOW_SLOWDOWN = 20e6, 3
# If MKL is faster, the packed copy saves up to a seventh of an Intel Xeon's time from 2^19 numbers on. At 2^18 it
# costs a tenth, and at 2^15 it takes two to four times as long.
MIN_PACKED = 2**19
# oneDNN prepares kernels for each new C, then keeps them.
ROW_MULTIPLE = 4
_TINY = 1e-20  # transformers', against scores that are all 0


class PackedExperts:
    """A copy of one layer's expert matrices in the order in which oneDNN reads them.

    A 1x1 convolution in E groups is a product of E matrices. It is the only such product of oneDNN's that torch
    offers, and takes a third of the time of MKL's where that keeps to AVX2.
    """

    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        self._experts = len(w2)
        self._w13, self._w2 = self._pack(w13), self._pack(w2)

    @staticmethod
    def usable(w13: Tensor) -> bool:
        """True if a packed copy of a layer's matrices ``w13`` is faster here: on a CPU with oneDNN, in float32."""
        leads = ONEDNN_LEADS or w13.numel() >= MIN_PACKED
        return HAS_ONEDNN and leads and w13.device.type == "cpu" and w13.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Expert e's output on ``x[:, e]``: [C, E, H] -> [C, E, H]."""
        return self._product(_gated(self._product(x, self._w13)), self._w2)

    def _pack(self, weight: Tensor) -> Tensor:
        experts, rows, columns = weight.shape
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
            weight.reshape(experts * rows, columns, 1, 1), [0, 0], [1, 1], [1, 1], experts, None
        )
        return packed

    def _product(self, x: Tensor, packed: Tensor) -> Tensor:
        """[C, E, in] -> [C, E, out]: the image is one column of C pixels, the channels lie last."""
        image = x.view(1, len(x), 1, -1).permute(0, 3, 1, 2)
        out: Tensor = torch.ops.mkldnn._convolution_pointwise(
            image, packed, None, [0, 0], [1, 1], [1, 1], self._experts, "none", [], ""
        )
        return out.permute(0, 2, 3, 1).view(len(x), self._experts, -1)


def choose_experts(router_logits: Tensor, shape: ModelShape, selection_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numbers [N, k] of the experts that tokens with ``router_logits`` [N, E] choose, and their weights [N, k] float32.

    `Router` says what scores are, and what ``selection_bias`` [E] is.
    """
    router, k = shape.router, shape.experts_per_token
    if router.score == "softmax" and shape.normalize_top_k and selection_bias is None and router.groups == 1:
        # softmax over the chosen equals the chosen of the softmax, renormalized
        top, chosen = router_logits.topk(k, dim=-1)
        return chosen, top.softmax(-1, dtype=torch.float32).mul_(router.scaling)
    softmax = router.score == "softmax"
    scores = router_logits.softmax(-1, dtype=torch.float32) if softmax else router_logits.float().sigmoid()
    rated = scores if selection_bias is None else scores + selection_bias
    chosen = _mask_other_groups(rated, router).topk(k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if shape.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return chosen, weights.mul_(router.scaling)


def _mask_other_groups(rated: Tensor, router: Router) -> Tensor:
    """Returns minus infinity outside of each token's best groups of experts."""
    if router.groups == 1:
        return rated
    grouped = rated.unflatten(-1, (router.groups, -1))
    of_group = grouped.topk(2, dim=-1).values.sum(-1) if router.group_score == "top2" else grouped.amax(-1)
    worse = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, of_group.topk(router.top_groups).indices, False)
    best: Tensor = grouped.masked_fill(worse[..., None], -inf).flatten(1)
    return best


def mix_experts(
    residual: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, packed: PackedExperts | None
) -> Tensor:
    """``residual`` [N, H] plus the outputs of the ``chosen`` experts on ``x`` [N, H], times ``weights``; both [N, k].

    ``w13`` [E, 2I, H] (gate, then up); ``w2`` [E, H, I]; ``packed``: a packed copy of both, if there is one.
    """
    wasted_flops = 2 * len(x) * (w13.shape[0] - chosen.shape[1]) * (w13[0].numel() + w2[0].numel())
    weights = weights.to(x.dtype)
    if wasted_flops <= MAX_DENSE_WASTE_FLOPS:
        return all_experts(residual, x, chosen, weights, w13, w2)
    return grouped_experts(residual, x, chosen, weights, w13, w2, packed)


def all_experts(residual: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Computes all E experts in two dense products, and weights the others by 0: the least overhead for few tokens.

    ``chosen`` and ``weights`` [N, k].
    """
    num, experts, width = len(x), w13.shape[0], w2.shape[2]
    gate_up = linear(x, w13.view(-1, x.shape[1])).view(num, experts, 2, width)
    active = functional.silu(gate_up[:, :, 0]).mul_(gate_up[:, :, 1])
    active.mul_(weights.new_zeros(num, experts).scatter_(1, chosen, weights).unsqueeze(-1))
    return linear(active.view(num, -1), w2.transpose(0, 1).reshape(w2.shape[1], -1)).add_(residual)


def grouped_experts(
    residual: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, packed: PackedExperts | None
) -> Tensor:
    """Gathers tokens by expert: a product of E matrices computes C padded rows of each, and a loop the rows beyond."""
    (num, k), experts = chosen.shape, w13.shape[0]
    place = chosen.new_zeros(num, experts).scatter_(1, chosen, 1).cumsum(0)  # counts from 1 among an expert's tokens
    counts = place[-1].tolist()
    capacity = _capacity(counts, 2 * (w13[0].numel() + w2[0].numel()))
    place = place.gather(1, chosen)
    # Slots: [C, E], row by row, then the overflow, expert by expert.
    slot, grouped = (place - 1).mul_(experts).add_(chosen), capacity * experts
    overflow = [max(count - capacity, 0) for count in counts]
    if any(overflow):
        before_first = torch.tensor(list(accumulate(overflow[:-1], initial=grouped - capacity - 1)), device=x.device)
        slot = torch.where(place > capacity, place + before_first.take(chosen), slot)
    slot = slot.view(-1)
    token_of_pair = torch.arange(num, device=x.device)[:, None].expand(num, k).reshape(-1)
    token_of_slot = slot.new_zeros(grouped + sum(overflow)).scatter_(0, slot, token_of_pair)
    gathered = x.index_select(0, token_of_slot)
    parts = []
    if capacity:  # 0 where few experts have all the tokens
        parts.append(_grouped_products(gathered[:grouped].view(capacity, experts, -1), w13, w2, packed).flatten(0, 1))
    if any(overflow):
        parts += _looped_products(gathered[grouped:].split(overflow), w13, w2)
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    # Each token's sum of its k rows of `out`, weighted.
    starts = torch.arange(0, num * k, k, device=x.device)
    mixed: Tensor = torch.embedding_bag(out, slot, starts, False, 0, False, weights.view(-1))[0]
    return mixed.add_(residual)


def _capacity(counts: list[int], flops_per_row: int) -> int:
    """Returns the cheapest C for experts with ``counts`` tokens: fewer rows for all, or fewer experts beyond C."""
    best, lowest = 0, inf
    for count in sorted(counts, reverse=True):
        capacity = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
        beyond = [OVERFLOW_FLOPS + OVERFLOW_SLOWDOWN * flops_per_row * (n - capacity) for n in counts if n > capacity]
        cost = flops_per_row * capacity * len(counts) + sum(beyond)
        if cost > lowest:
            break
        best, lowest = capacity, cost
    return best


def _grouped_products(x: Tensor, w13: Tensor, w2: Tensor, packed: PackedExperts | None) -> Tensor:
    """Expert e's output on ``x[:, e]``: [C, E, H] -> [C, E, H]."""
    if packed:
        return packed(x)
    gate_up = torch.bmm(x.transpose(0, 1), w13.transpose(1, 2))
    return torch.bmm(_gated(gate_up), w2.transpose(1, 2)).transpose(0, 1).contiguous()


def _looped_products(rows: Iterable[Tensor], w13: Tensor, w2: Tensor) -> list[Tensor]:
    """Expert e's output on ``rows[e]`` [.., H]; experts without rows are skipped."""
    return [linear(_gated(linear(x, up)), down) for x, up, down in zip(rows, w13, w2, strict=True) if len(x)]


def _gated(gate_up: Tensor) -> Tensor:
    """SwiGLU: [..., 2I] -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


_ALPHA = 1.702  # gpt-oss': gate * sigmoid(alpha * gate)


class DenseMlp:
    """Gate, up and down of one width."""

    def __init__(self, shape: ModelShape, width: int, zeros: Zeros) -> None:
        self._w13, self._w2 = zeros(2 * width, shape.hidden_size), zeros(shape.hidden_size, width)

    def named(self, prefix: str = "mlp.") -> dict[str, Tensor]:
        """Its tensors, to write in place."""
        gate, up = self._w13.chunk(2)
        return {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": self._w2}

    def __call__(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` [N, H] plus the output for ``x`` [N, H]."""
        gate, up = linear(x, self._w13).chunk(2, -1)
        return linear(functional.silu(gate).mul_(up), self._w2).add_(residual)


class ExpertMlp(Protocol):
    """A router and its experts."""

    def named(self) -> dict[str, Tensor]:
        """Its tensors, to write in place, by their names in a layer."""
        ...

    def __call__(self, residual: Tensor, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """``residual`` [N, H] plus the outputs of the experts chosen for ``x`` [N, H], and their numbers [N, k].
        ``noise`` [N, E] is added to the router's logits."""
        ...


class GatedExperts(ExpertMlp):
    """Experts that are gated MLPs, and shared ones, which are one MLP for all tokens."""

    def __init__(self, shape: ModelShape, names: ExpertNames, zeros: Zeros) -> None:
        self._shape, self._names = shape, names
        self._router = zeros(shape.num_experts, shape.hidden_size)
        # Its dtype is always float32, like in transformers: a rounded bias would choose other experts.
        bias = shape.router.selection_bias
        self._selection_bias = zeros(shape.num_experts, dtype=torch.float32) if bias else None
        self._w13 = zeros(shape.num_experts, 2 * shape.expert_width, shape.hidden_size)  # gate rows, then up rows
        # A transposed view of [H, E, I], so that all experts are also one [H, E * I] matrix.
        self._w2 = zeros(shape.hidden_size, shape.num_experts, shape.expert_width).transpose(0, 1)
        self._shared = DenseMlp(shape, shape.shared_width, zeros) if shape.shared_width else None
        self._shared_gate = zeros(1, shape.hidden_size) if shape.shared_gate else None
        self._packed: PackedExperts | None = None
        self._packed_is_current = False

    def pack(self) -> None:
        """Makes the products faster until `unpack`, if the processor can; no weight may be written meanwhile."""
        if PackedExperts.usable(self._w13):
            self._packed, self._packed_is_current = PackedExperts(self._w13, self._w2), True

    def unpack(self) -> None:
        """Computes with the weights themselves; the copy's memory is kept for the next."""
        self._packed_is_current = False

    def named(self) -> dict[str, Tensor]:  # noqa: D102
        prefix, width = self._names.prefix, self._shape.expert_width
        found = {prefix + self._names.router: self._router}
        if self._selection_bias is not None:
            found[prefix + self._names.selection_bias] = self._selection_bias
        if self._shared is not None:
            found |= self._shared.named(prefix + self._names.shared)
        if self._shared_gate is not None:
            found[f"{prefix}{self._names.shared.rstrip('.')}_gate.weight"] = self._shared_gate
        if self._shape.stacked_experts:
            return found | {f"{prefix}experts.gate_up_proj": self._w13, f"{prefix}experts.down_proj": self._w2}
        for e in range(self._shape.num_experts):
            parts = zip(self._names.parts, (self._w13[e, :width], self._w13[e, width:], self._w2[e]), strict=True)
            found |= {f"{prefix}experts.{e}.{name}.weight": tensor for name, tensor in parts}
        return found

    def __call__(self, residual: Tensor, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        chosen, shares = choose_experts(_logits(x, self._router, None, noise), self._shape, self._selection_bias)
        packed = self._packed if self._packed_is_current else None
        if self._shared is not None:
            residual = self._add_shared(self._shared, residual, x)
        return mix_experts(residual, x, chosen, shares, self._w13, self._w2, packed), chosen

    def _add_shared(self, shared: DenseMlp, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` plus the output of shared experts, multiplied by their gate if they have one."""
        if self._shared_gate is None:
            return shared(residual, x)
        gate = functional.linear(x, self._shared_gate).sigmoid()
        return torch.addcmul(residual, gate, shared(torch.zeros_like(residual), x))


class ClampedExperts(ExpertMlp):
    """gpt-oss' experts: gate and up interleaved and clamped, with biases. All of them compute every token."""

    def __init__(self, shape: ModelShape, zeros: Zeros) -> None:
        self._shape = shape
        experts, hidden, width = shape.num_experts, shape.hidden_size, shape.expert_width
        self._router, self._bias = zeros(experts, hidden), zeros(experts)
        self._gate_up, self._gate_up_bias = zeros(experts, hidden, 2 * width), zeros(experts, 2 * width)
        self._down, self._down_bias = zeros(experts, width, hidden), zeros(experts, hidden)

    def named(self) -> dict[str, Tensor]:  # noqa: D102
        return {
            "mlp.router.weight": self._router,
            "mlp.router.bias": self._bias,
            "mlp.experts.gate_up_proj": self._gate_up,
            "mlp.experts.gate_up_proj_bias": self._gate_up_bias,
            "mlp.experts.down_proj": self._down,
            "mlp.experts.down_proj_bias": self._down_bias,
        }

    def __call__(self, residual: Tensor, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        chosen, shares = choose_experts(_logits(x, self._router, self._bias, noise), self._shape, None)
        limit = self._shape.clamped_swiglu
        both = torch.baddbmm(self._gate_up_bias[:, None], x.expand(len(self._down), -1, -1), self._gate_up)
        gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        every = torch.baddbmm(self._down_bias[:, None], (up + 1) * gate * (gate * _ALPHA).sigmoid(), self._down)
        mine = every.transpose(0, 1).gather(1, chosen[..., None].expand(-1, -1, every.shape[-1]))  # [N, k, H]
        return residual + (mine * shares.to(x.dtype)[..., None]).sum(1), chosen


def _logits(x: Tensor, router: Tensor, bias: Tensor | None, noise: Tensor | None) -> Tensor:
    """[N, E]"""
    logits = functional.linear(x, router, bias)
    return logits if noise is None else logits.float() + noise
