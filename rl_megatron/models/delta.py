"""A gated delta net in place of attention in plain torch: its weights, with their Hugging Face names, and its states.

Letters: N tokens, H hidden, K key heads with R value heads each, dk and dv their sizes, M mixed channels, T taps of the
convolution, L layers with a delta net. Source: transformers ``models/qwen3_next``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rl_megatron.models.attention import Context, LayerAttention, Zeros
from rl_megatron.models.delta_rule import by_chunks, by_position
from rl_megatron.models.linear import linear
from rl_megatron.models.norms import rms_norm
from rl_megatron.models.shape import DeltaNet, ModelShape


class DeltaLayer(LayerAttention):
    """One layer's delta net. ``grouped``: its inputs are two matrices, whose rows are those of one key head after the
    other, in place of four."""

    def __init__(self, shape: ModelShape, zeros: Zeros, eps: Tensor, *, grouped: bool) -> None:
        assert shape.delta is not None
        m = self._sizes = shape.delta
        self._eps, self._grouped = eps, grouped
        sizes = {"qkvz": m.mixed + m.outputs, "ba": 2 * m.value_heads}
        if not grouped:
            sizes = {"qkv": m.mixed, "z": m.outputs, "b": m.value_heads, "a": m.value_heads}
        self._inputs = {name: zeros(rows, shape.hidden_size) for name, rows in sizes.items()}
        self._taps = zeros(m.mixed, 1, m.kernel)
        self._log_rate, self._bias = zeros(m.value_heads), zeros(m.value_heads)
        self._norm = zeros(m.value_dim)
        self._output = zeros(shape.hidden_size, m.outputs)

    def named(self) -> dict[str, Tensor]:  # noqa: D102
        return {
            **{f"linear_attn.in_proj_{name}.weight": tensor for name, tensor in self._inputs.items()},
            "linear_attn.conv1d.weight": self._taps,
            "linear_attn.A_log": self._log_rate,
            "linear_attn.dt_bias": self._bias,
            "linear_attn.norm.weight": self._norm,
            "linear_attn.out_proj.weight": self._output,
        }

    def __call__(  # noqa: D102
        self, layer: int, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], context: Context
    ) -> Tensor:
        heads = self._sizes.key_heads
        mixed, gate, beta, step = self._projected(x)
        decay = -self._log_rate.float().exp() * functional.softplus(step.float() + self._bias.float())
        per_head = (part.view(len(x), heads, -1) for part in (decay, beta.float().sigmoid()))
        out = context.remember(layer, mixed, self._taps, *per_head).to(x.dtype)
        normed = rms_norm(out, self._norm, self._eps)
        gated = (normed.float() * functional.silu(gate.float()).view_as(normed)).to(x.dtype)
        return linear(gated.flatten(1), self._output).add_(residual)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[N, H] -> all queries, then keys, then values [N, M], the output's gate, beta and the step of each value
        head."""
        m = self._sizes
        given = {name: linear(x, weight) for name, weight in self._inputs.items()}
        if not self._grouped:
            return given["qkv"], given["z"], given["b"], given["a"]
        values = m.ratio * m.value_dim
        parts = given["qkvz"].view(len(x), m.key_heads, -1).split([m.key_dim, m.key_dim, values, values], -1)
        *mixed, gate = (part.flatten(1) for part in parts)
        beta, step = given["ba"].view(len(x), m.key_heads, 2, m.ratio).unbind(2)
        return torch.cat(mixed, 1), gate, beta.flatten(1), step.flatten(1)


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """What the delta nets of some sequences remember."""

    taps: Tensor  # [L, N, M, T - 1] the last inputs of the convolution, zeros before a sequence
    states: Tensor  # [L, N, K, R, dk, dv] float32

    @staticmethod
    def zeros(shape: ModelShape, rows: int, dtype: torch.dtype | None, device: torch.device) -> DeltaStates:
        """Of sequences that have not begun."""
        m = shape.delta or DeltaNet(key_heads=1, value_heads=1, key_dim=0, value_dim=0, kernel=1)
        layers, size = len(shape.delta_layers), (m.key_heads, m.ratio, m.key_dim, m.value_dim)
        return DeltaStates(
            torch.zeros(layers, rows, m.mixed, m.kernel - 1, dtype=dtype, device=device),
            torch.zeros(layers, rows, *size, dtype=torch.float32, device=device),
        )

    def of(self, rows: Tensor) -> DeltaStates:
        """Copies of ``rows``' states."""
        return DeltaStates(self.taps.index_select(1, rows), self.states.index_select(1, rows))

    def write(self, rows: slice | Tensor, those: DeltaStates) -> None:
        """Replace the states of ``rows``."""
        self.taps[:, rows], self.states[:, rows] = those.taps, those.states

    def step(self, net: int, x: Tensor, taps: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """One token of each of the first N rows, in the ``net``-th delta net (see `Context.remember`)."""
        seen, state = self.taps[net, : len(x)], self.states[net, : len(x)]
        window = torch.cat((seen, x[..., None]), -1)
        seen.copy_(window[..., 1:])
        mixed = functional.silu((window * taps[:, 0]).sum(-1))
        return by_position(state, *_heads(mixed, state), decay, beta)


def remember_whole(
    x: Tensor, taps: Tensor, decay: Tensor, beta: Tensor, states: DeltaStates, net: int, lengths: Tensor
) -> Tensor:
    """Whole sequences from their starts: x [P, longest, M], decay and beta [P, longest, K, R], zeros after each
    sequence's ``lengths`` [P] -> [P, longest, K, R, dv]. Writes the ``net``-th states."""
    gap, count = taps.shape[-1] - 1, -(-x.shape[1] // DeltaNet.chunk)
    padded = functional.pad(x.mT, (gap, 0))
    last = lengths[:, None] + torch.arange(gap, device=x.device)
    states.taps[net] = padded.gather(2, last[:, None].expand(-1, x.shape[-1], -1))
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    mixed = functional.silu(functional.conv1d(padded, taps, groups=len(taps))).mT * inside[..., None]

    def chunks(part: Tensor) -> Tensor:
        """[P, longest, ...] -> [n, C, ...], the first chunks of all sequences, then their second ones."""
        room = part.new_zeros(len(part), count * DeltaNet.chunk, *part.shape[2:])
        room[:, : part.shape[1]] = part
        cut: Tensor = room.unflatten(1, (count, -1))
        return cut.transpose(0, 1).flatten(0, 1)

    query, key, value = (chunks(part).movedim(1, -2) for part in _heads(mixed, states.states))
    logs, betas = (chunks(part).movedim(1, -1) for part in (decay, beta))
    out, states.states[net] = by_chunks(query, key, value, logs, betas, [len(x)] * count)
    by_chunk: Tensor = out.movedim(-2, 1).unflatten(0, (count, -1))
    return by_chunk.transpose(0, 1).flatten(1, 2)[:, : x.shape[1]]


def _heads(mixed: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., M] -> queries and keys [..., K, dk], values [..., K, R, dv], float32."""
    heads, ratio, key, value = state.shape[-4:]
    query, keys, values = mixed.float().split([heads * key, heads * key, heads * ratio * value], -1)
    return (
        query.unflatten(-1, (heads, key)),
        keys.unflatten(-1, (heads, key)),
        values.unflatten(-1, (heads, ratio, value)),
    )
