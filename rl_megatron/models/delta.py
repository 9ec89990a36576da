"""A gated delta net in place of attention in plain torch: its weights, with their Hugging Face names, and its states.

Letters: N tokens, H hidden, K key heads with R value heads each, dk and dv their sizes, M mixed channels, T taps of the
convolution, L layers with a delta net. Source: transformers ``models/qwen3_next``.

The gated delta rule (arXiv:2412.06464): over chunks of positions, and over one position.

A head's state S [dk, dv] is, after each position, ``exp(g) S + k (beta (v - exp(g) S^T k))^T``, its output ``S^T q``.
Inside a chunk that is a triangular system, solved for all chunks and heads together; only the state goes from chunk to
chunk, and there all sequences go together.

Letters: n chunks of C positions, K key heads with R value heads each, dk and dv their sizes, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rl_megatron.models.attention import Context, LayerAttention, Zeros
from rl_megatron.models.operations import linear, rms_norm
from rl_megatron.models.shape import DeltaNet, ModelShape

_EPS = 1e-6  # added to the squared length of queries and keys


def attend_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns each position's output [n, K, R, C, dv], and the state [K, R, dk, dv] after the last chunks. query and
    key are [n, K, C, dk], value [n, K, R, C, dv], decay (the logarithm, at most 0) and beta [n, K, R, C].

    The first ``counts[0]`` chunks begin sequences, the next ``counts[1]`` follow the first of those, and so on.
    Queries and keys are made of length 1, queries over sqrt(dk). Where beta and decay are 0, no state changes.
    """
    query, key = _unit(query), _unit(key)
    parts = _inside(query * query.shape[-1] ** -0.5, key, value, decay, beta)
    before, new, state = _scan(parts, counts)
    return parts.reads @ before + parts.mixes @ new, state


def attend_position(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Returns [N, K, R, dv] for one position of each row: query, key [N, K, dk], value [N, K, R, dv], decay and beta
    [N, K, R]. Writes ``state`` [N, K, R, dk, dv]."""
    query, key = (_unit(x)[:, :, None, None] for x in (query, key))
    state *= decay.exp()[..., None, None]
    new = (value[..., None, :] - key @ state) * beta[..., None, None]
    state += key.mT * new
    out: Tensor = (query * query.shape[-1] ** -0.5 @ state).squeeze(-2)
    return out


def _unit(x: Tensor) -> Tensor:
    out: Tensor = x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()
    return out


class _Parts(NamedTuple):
    """The results of every chunk that do not depend on the state before it."""

    values: Tensor  # [n, K, R, C, dv] values to write if that state is 0
    state_reads: Tensor  # [n, K, R, C, dk] reads the part of them that the state knows already
    reads: Tensor  # [n, K, R, C, dk] queries, decayed from that state on
    mixes: Tensor  # [n, K, R, C, C] weights with which queries read the chunk's own values
    writes: Tensor  # [n, K, R, C, dk] keys, decayed to the chunk's end
    keeps: Tensor  # [n, K, R, 1, 1] factor of the part of that state that stays


def _running_sums(g: Tensor, above: Tensor) -> Tensor:
    """``g.cumsum(-1)`` of [..., C], which torch refuses on GPUs with deterministic algorithms; ``above`` [C, C] are the
    later positions. As a sum for each position it rounds more where two are subtracted."""
    if g.is_cpu or not torch.are_deterministic_algorithms_enabled():
        return g.cumsum(-1)
    return g[..., None, :].masked_fill(above, 0.0).sum(-1)


def _inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> _Parts:
    """q, k [n, K, C, dk], v [n, K, R, C, dv], g and b [n, K, R, C]."""
    above = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    total = _running_sums(g, above)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()  # [n, K, R, C, C]
    scale, from_start = b[..., None], total.exp()[..., None]
    keys = k[:, :, None]
    system = (k @ k.mT)[:, :, None] * between * scale
    known = keys * (scale * from_start)
    solved = torch.linalg.solve_triangular(system, torch.cat([v * scale, known], -1), upper=False, unitriangular=True)
    values, known = solved.split([v.shape[-1], k.shape[-1]], -1)
    end = total[..., -1:]
    return _Parts(
        values=values,
        state_reads=known,
        reads=q[:, :, None] * from_start,
        mixes=(q @ k.mT)[:, :, None] * between,
        writes=keys * (end - total).exp()[..., None],
        keeps=end.exp()[..., None],
    )


def _scan(parts: _Parts, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the state before each chunk [n, K, R, dk, dv], its writes [n, K, R, C, dv], and the last states."""
    columns = (parts.values, parts.state_reads, parts.writes, parts.keeps)
    steps = zip(*(part.split(list(counts)) for part in columns), strict=True)
    state = parts.values.new_zeros(*parts.state_reads.shape[:3], parts.state_reads.shape[-1], parts.values.shape[-1])[
        : counts[0]
    ]
    before, new = [], []
    for values, known, writes, keeps in steps:
        state = state[: len(values)]
        before.append(state)
        new.append(values - known @ state)
        state = state * keeps + writes.mT @ new[-1]
    return torch.cat(before), torch.cat(new), state


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
    """The states of the delta nets of some sequences."""

    taps: Tensor  # [L, N, M, T - 1] the last inputs of the convolution, zeros before a sequence
    states: Tensor  # [L, N, K, R, dk, dv] float32

    @staticmethod
    def zeros(shape: ModelShape, rows: int, dtype: torch.dtype | None, device: torch.device) -> DeltaStates:
        """Returns the states of sequences that have not begun."""
        m = shape.delta or DeltaNet(key_heads=1, value_heads=1, key_dim=0, value_dim=0, kernel=1)
        layers, size = len(shape.delta_layers), (m.key_heads, m.ratio, m.key_dim, m.value_dim)
        return DeltaStates(
            torch.zeros(layers, rows, m.mixed, m.kernel - 1, dtype=dtype, device=device),
            torch.zeros(layers, rows, *size, dtype=torch.float32, device=device),
        )

    def select(self, rows: Tensor) -> DeltaStates:
        """Returns copies of ``rows``' states."""
        return DeltaStates(self.taps.index_select(1, rows), self.states.index_select(1, rows))

    def write(self, rows: slice | Tensor, those: DeltaStates) -> None:
        """Replaces the states of ``rows``."""
        self.taps[:, rows], self.states[:, rows] = those.taps, those.states

    def step(self, net: int, x: Tensor, taps: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Computes one token of each of the first N rows, in the ``net``-th delta net (see `Context.remember`)."""
        seen, state = self.taps[net, : len(x)], self.states[net, : len(x)]
        window = torch.cat((seen, x[..., None]), -1)
        seen.copy_(window[..., 1:])
        mixed = functional.silu((window * taps[:, 0]).sum(-1))
        return attend_position(state, *_heads(mixed, state), decay, beta)


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
    out, states.states[net] = attend_chunks(query, key, value, logs, betas, [len(x)] * count)
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
