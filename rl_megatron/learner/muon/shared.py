"""Muon and AdamW over one model, whose parameters data-parallel ranks share out whole, as megatron-core's
``layer_wise_optimizer.py``: a rank holds the state of its own, steps them, and then ranks exchange the new weights.

What is other than there: experts are shared out also where dense parameters are not, the exchange takes one buffer of
`_BUCKET` bytes and not a second copy of the model, and a checkpoint loads into any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    _get_megatron_optimizer_based_on_param_groups,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from rl_megatron.learner.adam.groups import by_decay
from rl_megatron.learner.muon.matrices import Matrices, find_matrices
from rl_megatron.learner.muon.newton_schulz import Muon

_BUCKET = 64 << 20  # bytes that one broadcast carries, or one parameter
_MOMENTS = 1, 2  # of Muon and of AdamW


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
        super().__init__([_muon(config, matrices), _adam(config, chunks, others)])
        for part in self.chained_optimizers:
            part.grad_stats_parallel_group = world  # where each gradient is on one rank

    def step_with_ready_grads(self) -> bool:
        """Step this rank's parameters, then exchange all."""
        super().step_with_ready_grads()
        for group, owners in self._owned:
            if group.size() > 1:
                exchange(owners, group)
        return True

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **_: Any) -> dict[str, Any]:
        """This rank's state, each tensor under its parameter's global name and box, whichever ranks hold it.

        The count of AdamW's steps is that of all ranks: rank 0, which saves it, may have nothing to step with AdamW.
        """
        known = get_param_id_to_sharded_param_map(model_sharded_state_dict, self._stepped)
        tensors = {}
        for number, name, tensor in self._state():
            sharded = make_sharded_optimizer_tensor(known[number], tensor, prefix=f"optimizer.state.{name}")
            sharded.replica_id = (*sharded.replica_id[:2], 0)  # the only one of the data-parallel ranks
            tensors[f"{number}.{name}"] = sharded
        return {"tensors": tensors, "adam_steps": self._adam_steps()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` said, with this layout's tensors."""
        for number, name, tensor in self._state():
            tensor.copy_(state_dict["tensors"][f"{number}.{name}"])
        adam = self.chained_optimizers[1].optimizer
        if not isinstance(adam, torch.optim.AdamW):  # groups of others have no step before the first
            for group in adam.param_groups:
                group.setdefault("step", 0)
        for count in self._counts():
            count["step"] = _as_before(count["step"], state_dict["adam_steps"])

    def _state(self) -> Iterator[tuple[int, str, Tensor]]:
        """The number of each parameter that this rank steps, and the names and tensors of its state, which is there."""
        muon, adam = (part.optimizer for part in self.chained_optimizers)
        for number, parameter in enumerate(self._stepped):
            main = _main(parameter)
            state = muon.state[main] if main in muon.state else adam.state[main]
            yield from ((number, name, tensor) for name, tensor in state.items() if name != "step")
            if main is not parameter:
                yield number, "fp32_param", main

    def _counts(self) -> list[dict[str, Any]]:
        """What has AdamW's ``step``: states of torch's, groups of the fused ones."""
        adam = self.chained_optimizers[1].optimizer
        return [one for one in (*adam.state.values(), *adam.param_groups) if "step" in one]

    def _adam_steps(self) -> int:
        found = [float(count["step"]) for count in self._counts()]
        most = torch.tensor(max(found, default=0.0), device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)


def share_out(parameters: Sequence[tuple[Tensor, Matrices | None]], ranks: int) -> list[list[Tensor]]:
    """For each rank the parameters whose state it holds: the largest first, each to the rank that has the least.

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
    """Overwrite the parameters of each rank of ``group`` by those of their owner. Every rank of it calls it."""
    for owner, parameters in enumerate(owners):
        for bucket in _buckets(parameters):
            alone = len(bucket) == 1 and bucket[0].is_contiguous()  # the embedding, of which a copy would be large
            flat = bucket[0].view(-1) if alone else torch.cat([p.reshape(-1) for p in bucket])
            dist.broadcast(flat, group=group, group_src=owner)
            if group.rank() != owner and not alone:
                for parameter, new in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    parameter.copy_(new.view_as(parameter))


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in turn, as many together as `_BUCKET` bytes hold, of one dtype."""
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


def _adam(config: OptimizerConfig, chunks: Sequence[Any], parameters: list[Tensor]) -> MegatronOptimizer:
    made: MegatronOptimizer = _get_megatron_optimizer_based_on_param_groups(
        config, list(chunks), by_decay(config, chunks, parameters)
    )
    return made


def _no_state(*_: Any) -> None:
    """`LayerWise` does not ask megatron for state: `rl_megatron.learner.optimizer.create_state` makes it."""


def _main(parameter: Tensor) -> Tensor:
    """The float32 copy of a parameter that is stepped instead of it, if there is one."""
    found: Tensor = getattr(parameter, "main_param", parameter)
    return found


def _as_before(step: Tensor | int, steps: int) -> Tensor | int:
    return torch.full_like(step, steps) if isinstance(step, Tensor) else steps
