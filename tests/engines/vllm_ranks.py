"""Our worker extension for a vLLM of several data- or expert-parallel ranks on CPUs, loaded by a test's server.

vLLM 0.32.0's communicator for CPUs has no collectives over unequal parts, which tokens of data-parallel ranks need, and
its experts on CPUs do not know which of all experts are a rank's own. GPUs have both; here torch has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from rl_megatron.engines.vllm.worker import WorkerExtension

__all__ = ["WorkerExtension"]
_apply = CPUUnquantizedExperts.apply


def _all_gatherv(self: Any, given: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    if isinstance(given, list):
        return [_all_gatherv(self, one, dim, sizes) for one in given]
    rows = list(sizes or [len(given)] * self.world_size)
    padded = given.new_zeros((max(rows), *given.shape[1:]))
    padded[: len(given)] = given
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=self.cpu_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def _reduce_scatterv(self: Any, given: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    rows = list(sizes or [len(given) // self.world_size] * self.world_size)
    whole = given.clone()
    dist.all_reduce(whole, group=self.cpu_group)
    return whole.split(rows)[self.rank_in_group]


def _own_experts(self: Any, *given: Any, **named: Any) -> None:
    """Experts of other ranks get the weight 0."""
    call = signature(_apply).bind(self, *given, **named).arguments
    if (local := call["expert_map"]) is not None:
        ids = local[call["topk_ids"].long()]
        call["topk_weights"] = call["topk_weights"].masked_fill(ids < 0, 0.0)
        call["topk_ids"] = ids.clamp(min=0).to(call["topk_ids"].dtype)
    _apply(**call)


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
CPUUnquantizedExperts.apply = _own_experts
