"""Which parameters of a model are matrices for Muon, which matrices lie in one parameter, and how TP cuts them.

The rule: each matrix of a decoder layer that is a linear map is stepped by itself: queries, keys, values, gate and up,
also those of each expert. Routers are among them, as in Moonlight (arXiv:2502.16982) and megatron-core's ``muon.py``.
AdamW steps the rest, as there: the embedding, the output layer, a critic's value layer, norms, biases, sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_megatron.learner.model.experts import FusedExperts, TogetherExperts

_CUT_BY: Mapping[str, int | None] = {  # modules; TransformerEngine also marks weights as cut that are whole
    "linear_qkv": 0,
    "linear_fc1": 0,
    "linear_q_proj": 0,
    "linear_q_up_proj": 0,
    "linear_kv_up_proj": 0,
    "in_proj": 0,
    "linear_proj": 1,
    "out_proj": 1,
    "linear_fc2": 1,
    "linear_q_down_proj": None,
    "linear_kv_down_proj": None,
    "router": None,
}


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices in a parameter. ``parts`` gives their views in a tensor of its shape, all but the last dimension of
    a view being rows. Each is this rank's shard, along ``dim``, of one that the ranks of ``group`` hold together."""

    parts: Callable[[Tensor], Sequence[Tensor]]
    dim: int = 0
    group: dist.ProcessGroup | None = None

    def gather(self, own: Tensor) -> Tensor:
        """The whole matrix from its shards [m, n]. Every rank of the group calls it."""
        if self.group is None:
            return own
        shards = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(shards, own.contiguous(), group=self.group)
        return torch.cat(shards, self.dim)

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's shard of a whole matrix."""
        return whole if self.group is None else whole.chunk(self.group.size(), self.dim)[self.group.rank()]


def _one(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor]


def _halves(tensor: Tensor) -> Sequence[Tensor]:
    """Gate [f, h] and up [f, h] of [2f, h]."""
    gate, up = tensor.chunk(2)
    return gate, up


def _by_group(sizes: Sequence[int], tensor: Tensor) -> Sequence[Tensor]:
    """[groups, rows, h] for each of ``sizes``, of [groups * sum(sizes), h], where a group's rows are together."""
    parts: Sequence[Tensor] = tensor.unflatten(0, (-1, sum(sizes))).split(list(sizes), 1)
    return parts


def _fused_gate_up(tensor: Tensor) -> Sequence[Tensor]:
    """Gate and up [f, h] of each expert of [n, h, 2f], where they are interleaved."""
    return [expert[:, first::2].T for expert in tensor for first in (0, 1)]


def _fused_down(tensor: Tensor) -> Sequence[Tensor]:
    """[h, f] of each expert of [n, f, h]."""
    return [expert.T for expert in tensor]


def _stacked_gate_up(tensor: Tensor) -> Sequence[Tensor]:
    """Gate and up [f, h] of each expert of [n, 2f, h]."""
    return [half for expert in tensor for half in expert.chunk(2)]


def _stacked(tensor: Tensor) -> Sequence[Tensor]:
    """Each expert of [n, h, f]."""
    return tensor.unbind()


WHOLE = Matrices(_one)
"""A parameter that is one matrix, whole on this rank."""
_STACKED = {"gate_up_proj": Matrices(_stacked_gate_up), "down_proj": Matrices(_stacked)}
_FUSED = {"gate_up_proj": Matrices(_fused_gate_up), "down_proj": Matrices(_fused_down)}


def find_matrices(chunk: Any) -> Iterator[tuple[Tensor, Matrices | None]]:
    """Every trained parameter of a chunk, in the order of the model, with its matrices; None: AdamW steps it."""
    for path, module in chunk.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                inside = ".layers." in f".{path}."
                yield parameter, _matrices_of(path, name, module, parameter, chunk.config) if inside else None


def _matrices_of(path: str, name: str, module: Any, parameter: Tensor, config: Any) -> Matrices | None:
    if isinstance(module, TogetherExperts):
        return (_FUSED if isinstance(module, FusedExperts) else _STACKED).get(name)
    if parameter.dim() != 2 or "bias" in name:
        return None
    kind = path.rpartition(".")[2]
    dim = _CUT_BY.get(kind, _marked(parameter))
    if dim is not None and (group := _group(parameter)).size() > 1:
        return Matrices(_parts(kind, config), dim, group)
    return Matrices(_parts(kind, config)) if min(parameter.shape) > 1 else None  # a row is a vector


def _parts(kind: str, config: Any) -> Callable[[Tensor], Sequence[Tensor]]:
    if kind == "linear_fc1" and config.gated_linear_unit:
        return _halves
    if kind == "linear_qkv":
        each = config.kv_channels
        queries = config.num_attention_heads // config.num_query_groups * each
        gates = (queries,) if config.attention_output_gate else ()
        return partial(_by_group, (queries, *gates, each, each))
    if kind == "in_proj":
        m = config.shape.delta
        values = m.ratio * m.value_dim
        return partial(_by_group, (m.key_dim, m.key_dim, values, values, m.ratio, m.ratio))
    return _one


def _marked(parameter: Tensor) -> int | None:
    """The dimension that a layer of the user's own says is cut, by megatron's marks."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]


def _group(parameter: Tensor) -> dist.ProcessGroup:
    """The ranks that hold a parameter's shards together."""
    found: dist.ProcessGroup = (
        parallel_state.get_tensor_model_parallel_group()
        if getattr(parameter, "allreduce", True)
        else parallel_state.get_expert_tensor_parallel_group()
    )
    return found
