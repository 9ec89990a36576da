"""The part of a decoder layer after its attention, in plain torch: one MLP, or experts that a router chooses.

Letters: N tokens, H hidden, E experts, I width, k experts a token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rl_megatron.models.attention import Zeros
from rl_megatron.models.experts import PackedExperts, choose_experts, mix_experts
from rl_megatron.models.linear import linear
from rl_megatron.models.shape import ExpertNames, ModelShape

_ALPHA = 1.702  # gpt-oss': gate * sigmoid(alpha * gate)


class DenseMlp:
    """Gate, up and down of one width."""

    def __init__(self, shape: ModelShape, width: int, zeros: Zeros) -> None:
        self._w13, self._w2 = zeros(2 * width, shape.hidden_size), zeros(shape.hidden_size, width)

    def named(self, prefix: str = "mlp.") -> dict[str, Tensor]:
        """Its tensors, to write in place."""
        gate, up = self._w13.chunk(2)
        return {
            f"{prefix}gate_proj.weight": gate,
            f"{prefix}up_proj.weight": up,
            f"{prefix}down_proj.weight": self._w2,
        }

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
        # As in transformers, whatever the dtype: rounded, it would choose others.
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
        """Make the products faster until `unpack`, if the processor can; no weight may be written meanwhile."""
        if PackedExperts.usable(self._w13):
            self._packed, self._packed_is_current = PackedExperts(self._w13, self._w2), True

    def unpack(self) -> None:
        """Compute with the weights themselves; the copy's memory is kept for the next."""
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
            residual = self._beside(self._shared, residual, x)
        return mix_experts(residual, x, chosen, shares, self._w13, self._w2, packed), chosen

    def _beside(self, shared: DenseMlp, residual: Tensor, x: Tensor) -> Tensor:
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
