"""Muon's step of matrices, and Muon with AdamW over one model. Data-parallel ranks share its whole parameters out, like
megatron-core's ``layer_wise_optimizer.py``. A rank holds the state of its parameters and steps them. Then ranks
exchange the new weights.

Each matrix of a decoder layer that is a linear map is stepped separately: queries, keys, values, gate and up, also in
each expert. Routers are among them, as in Moonlight (arXiv:2502.16982) and megatron-core's ``muon.py``. AdamW steps the
rest, as there: the embedding, the output layer, a critic's value layer, norms, biases, sinks.

Differences from megatron-core: experts are shared out even if dense parameters are not. The exchange takes one
buffer of `_BUCKET` bytes and not a second copy of the model. A checkpoint loads into any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    _get_megatron_optimizer_based_on_param_groups,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from rl_megatron.learner.keywords import NEWTON_SCHULZ_STEPS
from rl_megatron.learner.model.experts import BatchedExperts, FusedExperts
from rl_megatron.learner.parameters import group_by_decay

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
    """The matrices in a parameter. ``parts`` returns their views in a tensor of its shape; all dimensions of a view but
    the last are rows. Each is this rank's shard, along ``dim``, of a matrix that the ranks of ``group`` share."""

    parts: Callable[[Tensor], Sequence[Tensor]]
    dim: int = 0
    group: dist.ProcessGroup | None = None

    def gather(self, own: Tensor) -> Tensor:
        """Returns the whole matrix from its shards [m, n]. Every rank of the group calls it."""
        if self.group is None:
            return own
        shards = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(shards, own.contiguous(), group=self.group)
        return torch.cat(shards, self.dim)

    def shard(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard of a whole matrix."""
        return whole if self.group is None else whole.chunk(self.group.size(), self.dim)[self.group.rank()]


def _one(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor]


def _halves(tensor: Tensor) -> Sequence[Tensor]:
    """Returns gate [f, h] and up [f, h] of [2f, h]."""
    return tensor.chunk(2)


def _split_groups(sizes: Sequence[int], tensor: Tensor) -> Sequence[Tensor]:
    """Returns [groups, rows, h] for each of ``sizes``, of [groups * sum(sizes), h] with a group's rows together."""
    parts: Sequence[Tensor] = tensor.unflatten(0, (-1, sum(sizes))).split(list(sizes), 1)
    return parts


def _fused_gate_up(tensor: Tensor) -> Sequence[Tensor]:
    """Returns gate and up [f, h] of each expert of [n, h, 2f], in which they are interleaved."""
    return [expert[:, first::2].T for expert in tensor for first in (0, 1)]


def _stacked_gate_up(tensor: Tensor) -> Sequence[Tensor]:
    """Returns gate and up [f, h] of each expert of [n, 2f, h]."""
    return [half for expert in tensor for half in expert.chunk(2)]


WHOLE = Matrices(_one)
"""A parameter that is one matrix, whole on this rank."""
_STACKED = {"gate_up_proj": Matrices(_stacked_gate_up), "down_proj": Matrices(torch.unbind)}  # [n, h, f]
_FUSED = {"gate_up_proj": Matrices(_fused_gate_up), "down_proj": Matrices(lambda every: every.mT.unbind())}  # [h, f]


def find_matrices(chunk: Any) -> Iterator[tuple[Tensor, Matrices | None]]:
    """Yields every trained parameter of a chunk, in the model's order, with its matrices; None: AdamW steps it."""
    for path, module in chunk.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                inside = ".layers." in f".{path}."
                yield parameter, _matrices_of(path, name, module, parameter, chunk.config) if inside else None


def _matrices_of(path: str, name: str, module: Any, parameter: Tensor, config: Any) -> Matrices | None:
    if isinstance(module, BatchedExperts):
        return (_FUSED if isinstance(module, FusedExperts) else _STACKED).get(name)
    if parameter.dim() != 2 or "bias" in name:
        return None
    kind = path.rpartition(".")[2]
    marked = getattr(parameter, "tensor_model_parallel", False)  # a custom layer's mark that it is cut
    dim = _CUT_BY.get(kind, getattr(parameter, "partition_dim", None) if marked else None)
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
        return partial(_split_groups, (queries, *gates, each, each))
    if kind == "in_proj":
        m = config.shape.delta
        values = m.ratio * m.value_dim
        return partial(_split_groups, (m.key_dim, m.key_dim, values, values, m.ratio, m.ratio))
    return _one


def _group(parameter: Tensor) -> dist.ProcessGroup:
    """Returns the ranks that hold a parameter's shards together."""
    found: dist.ProcessGroup = (
        parallel_state.get_tensor_model_parallel_group()
        if getattr(parameter, "allreduce", True)
        else parallel_state.get_expert_tensor_parallel_group()
    )
    return found


_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0: all but the smallest singular values end at 0.68 to 1.14
_MOMENTUM = 0.95  # decay of the moving mean of gradients, Nesterov's
_EPS = 1e-7  # lower bound of the norm, the same as in torch.optim.Muon
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""Factor of the update of a matrix with this many rows (outputs) and columns, by `MuonSection.scale`."""


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximates ``U V'`` of the singular value decomposition ``U S V'`` of [m, n] by five steps of the quintic
    Newton-Schulz iteration. They and the result are in ``dtype``. In bfloat16 it is torch.optim.Muon's."""
    a, b, c = _QUINTIC
    tall = matrix.size(0) > matrix.size(1)
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=_EPS)  # now no singular value exceeds 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameters that are several matrices, each stepped separately, or shards of matrices.

    ``matrices`` has an entry for each parameter that is not one whole matrix. Ranks that hold shards of a parameter
    have it at the same place in their lists, and step together. ``dtype`` is that of the iteration; the state, one
    ``momentum_buffer``, has the parameters' own.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        scale: str,
        weight_decay: float,
        dtype: torch.dtype,
        lr: float = 0.0,
    ) -> None:
        self.matrices: MutableMapping[Tensor, Matrices] = {}
        self.dtype = dtype
        super().__init__([{"params": list(params)}], {"lr": lr, "scale": scale, "weight_decay": weight_decay})

    def create_state(self) -> None:
        """Gives parameters that were never stepped their zero momentum."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps every parameter by its ``grad``. Weight decay is decoupled from it."""
        self.create_state()
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum, grad = self.state[parameter]["momentum_buffer"], parameter.grad
                momentum.lerp_(grad, 1 - _MOMENTUM)
                update = grad.lerp(momentum, _MOMENTUM)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                self._add(parameter, update, group)

    def _add(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        matrices = self.matrices.get(parameter, WHOLE)
        for part, own in zip(matrices.parts(parameter), matrices.parts(update), strict=True):
            whole = matrices.gather(own.flatten(0, -2))
            scale = SCALES[group["scale"]](*whole.shape)
            change = matrices.shard(orthogonalized(whole, self.dtype))
            part.add_(change.reshape(part.shape), alpha=-(group["lr"] * scale))


_BUCKET = 64 << 20  # bytes that one broadcast carries, or one parameter
_MOMENTS = 1, 2  # Muon's and AdamW's


class LayerWise(ChainedOptimizer):
    """Muon and AdamW, in this order, each over the parameters that are this rank's to step.

    Made, stepped, saved and loaded by every rank.
    """

    def __init__(self, config: OptimizerConfig, chunks: Sequence[DistributedDataParallel]) -> None:
        found = [pair for chunk in chunks for pair in find_matrices(chunk)]
        dense, experts = ([(p, m) for p, m in found if getattr(p, "allreduce", True) == kind] for kind in (True, False))
        groups = (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_expert_data_parallel_group(),
        )
        self._owned = [
            (group, share_out(part, group.size())) for group, part in zip(groups, (dense, experts), strict=True)
        ]
        mine = {id(p) for group, owners in self._owned for p in owners[group.rank()]}
        self._stepped = [p for p, _ in found if id(p) in mine]
        self._device = next(p.device for chunk in chunks for p in chunk.parameters())
        matrices = {p: m for p, m in found if m is not None and id(p) in mine}
        others = [p for p in self._stepped if p not in matrices]
        world = parallel_state.get_intra_distributed_optimizer_instance_group()
        adam = _get_megatron_optimizer_based_on_param_groups(
            config, list(chunks), group_by_decay(config, chunks, others)
        )
        super().__init__([_muon(config, matrices), adam])
        for part in self.chained_optimizers:
            part.grad_stats_parallel_group = world  # each gradient is on one rank of it

    def step_with_ready_grads(self) -> bool:
        """Steps this rank's parameters, then exchanges all."""
        super().step_with_ready_grads()
        for group, owners in self._owned:
            if group.size() > 1:
                exchange(owners, group)
        return True

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **_: Any) -> dict[str, Any]:
        """Returns this rank's state, each tensor under its parameter's global name and box, whichever ranks hold it.

        The count of AdamW's steps is that of all ranks: rank 0, which saves it, may have nothing to step with AdamW.
        """
        # get_param_id_to_sharded_param_map logs other ranks' parameters, which fails if their memory is freed
        numbers, places = {id(p): n for n, p in enumerate(self._stepped)}, nested_values(model_sharded_state_dict)
        known = {numbers[key]: one for one in places if (key := id(getattr(one, "data", None))) in numbers}
        tensors = {}
        for number, name, tensor in self._state():
            sharded = make_sharded_optimizer_tensor(known[number], tensor, prefix=f"optimizer.state.{name}")
            sharded.replica_id = (*sharded.replica_id[:2], 0)  # the only one of the data-parallel ranks
            tensors[f"{number}.{name}"] = sharded
        return {"tensors": tensors, "adam_steps": self._adam_steps()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of `sharded_state_dict`, with this layout's tensors."""
        for number, name, tensor in self._state():
            tensor.copy_(state_dict["tensors"][f"{number}.{name}"])
        adam = self.chained_optimizers[1].optimizer
        if not isinstance(adam, torch.optim.AdamW):  # groups of others have no step before the first
            for group in adam.param_groups:
                group.setdefault("step", 0)
        for count in self._counts():
            before, steps = count["step"], state_dict["adam_steps"]
            count["step"] = torch.full_like(before, steps) if isinstance(before, Tensor) else steps

    def _state(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yields the number of each parameter that this rank steps, and the names and tensors of its existing state."""
        muon, adam = (part.optimizer for part in self.chained_optimizers)
        for number, parameter in enumerate(self._stepped):
            main = _main(parameter)
            state = muon.state[main] if main in muon.state else adam.state[main]
            yield from ((number, name, tensor) for name, tensor in state.items() if name != "step")
            if main is not parameter:
                yield number, "fp32_param", main

    def _counts(self) -> list[dict[str, Any]]:
        """Returns the holders of AdamW's ``step``: states of torch's, groups of the fused ones."""
        adam = self.chained_optimizers[1].optimizer
        return [one for one in (*adam.state.values(), *adam.param_groups) if "step" in one]

    def _adam_steps(self) -> int:
        found = [float(count["step"]) for count in self._counts()]
        most = torch.tensor(max(found, default=0.0), device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)


def share_out(parameters: Sequence[tuple[Tensor, Matrices | None]], ranks: int) -> list[list[Tensor]]:
    """Assigns each parameter's state to a rank: the largest first, each to the rank that has the least state so far.

    Ranks of one tensor-parallel group share out the same sizes, so all shards of a matrix get the same place.
    """
    owners: list[list[Tensor]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    sizes = [(p, p.numel() * (_MOMENTS[matrices is None] + 1)) for p, matrices in parameters]
    for parameter, size in sorted(sizes, key=lambda pair: -pair[1]):
        least = held.index(min(held))
        owners[least].append(parameter)
        held[least] += size
    return owners


@torch.no_grad()
def exchange(owners: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
    """Overwrites the parameters of each rank of ``group`` by those of their owner. Every rank of it calls it."""
    for owner, parameters in enumerate(owners):
        for bucket in _buckets(parameters):
            alone = len(bucket) == 1 and bucket[0].is_contiguous()  # a copy of the embedding would be large
            flat = bucket[0].view(-1) if alone else torch.cat([p.reshape(-1) for p in bucket])
            dist.broadcast(flat, group=group, group_src=owner)
            if group.rank() != owner and not alone:
                for parameter, new in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    parameter.copy_(new.view_as(parameter))


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields lists of successive parameters of one dtype, each of at most `_BUCKET` bytes or one parameter."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        full = sum(p.nbytes for p in bucket) + parameter.nbytes > _BUCKET
        if bucket and (full or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _muon(config: OptimizerConfig, matrices: dict[Tensor, Matrices]) -> MegatronOptimizer:
    inner = Muon(
        matrices,
        scale=config.muon_scale_mode,
        weight_decay=config.weight_decay,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
    )
    wrapped: MegatronOptimizer = (
        Float16OptimizerWithFloat16Params(inner, config, None, _no_state)
        if config.bf16
        else FP32Optimizer(inner, config, _no_state)
    )
    inner.matrices = {_main(parameter): found for parameter, found in matrices.items()}
    return wrapped


def _no_state(*_: Any) -> None:
    """Does nothing: `rl_megatron.learner.optimizer.create_state` makes the state of `LayerWise`, not megatron."""


def _main(parameter: Tensor) -> Tensor:
    """Returns the float32 copy of a parameter that is stepped instead of it, if there is one."""
    found: Tensor = getattr(parameter, "main_param", parameter)
    return found
