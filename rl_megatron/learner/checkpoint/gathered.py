"""Optimizer states of data-parallel ranks, in the host's memory of the first of them, which writes them.

Megatron (0.16.1, ``get_parameter_state_dp_zero``) copies each state six times before a save has copied it, and all of
that while training waits. Here a shard is copied once; the rest needs no learner and runs in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rl_megatron.weights.bytes.staged import Staged

_KEYS = ("param", "exp_avg", "exp_avg_sq")  # float32 weights and moments
_FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A state of one buffer: this rank's shards of its buckets, and on the first rank the whole."""

    group: dist.ProcessGroup
    shards: Tensor
    whole: Tensor | None
    buckets: tuple[int, ...]  # elements of each, which ranks share evenly


class Gathered:
    """States of one save. ``staged`` gives the memory of what is copied; without it memory is the save's own."""

    def __init__(self, staged: Staged | None) -> None:
        self._staged, self._sent = staged, list[_Sent]()
        self.tensors: list[Tensor] = []  # flat float32, each in a storage of its own; in the same order in each save
        self._own = dict[int, int]()  # the number of each of their storages

    def collect(self, part: DistributedOptimizer, **_: Any) -> dict[Any, Any] | None:
        """Copy this rank's shards. Returns megatron's form of the states of all ranks on the first, else None; with
        several ranks they are undefined until `gather`. Every rank calls it."""
        group: dist.ProcessGroup = part.data_parallel_group_gloo
        first = group.rank() == 0
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, (buffer, by_dtype) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
            ((dtype, ranges),) = by_dtype.items()
            sizes = tuple(bucket.grad_data.numel() for bucket in buffer.buckets)
            shards = {key: self._take(sum(sizes) // group.size()) for key in _KEYS}
            whole = {key: shards[key] if group.size() == 1 else self._plain(sum(sizes)) for key in _KEYS if first}
            start = 0
            for size, places in zip(sizes, ranges, strict=True):
                for parameter, place in places["param_map"].items():
                    held, at = part._get_main_param_and_optimizer_states(parameter), place["gbuf_local"]
                    for key, shard in shards.items():
                        shard[start + at.start : start + at.end].copy_(held[key].detach(), non_blocking=True)
                start += size // group.size()
            if group.size() > 1:
                each = (_Sent(group=group, shards=shards[k], whole=whole.get(k), buckets=sizes) for k in _KEYS)
                self._sent.extend(each)
            state[index] = {dtype: {**whole, "numel_unpadded": sum(sizes)}}
        return state if first else None

    def gather(self) -> None:
        """Send the shards to each group's first rank, over gloo groups that nothing else uses. Every rank calls it,
        from one thread at a time."""
        for sent in self._sent:
            ranks, start = dist.get_process_group_ranks(sent.group), 0
            for size in sent.buckets:
                each = size // len(ranks)
                mine = sent.shards[start : start + each]
                at = start * len(ranks)
                into = None if sent.whole is None else list(sent.whole[at : at + size].split(each))
                dist.gather(mine, into, ranks[0], group=sent.group)
                start += each
        self._sent.clear()

    def number(self, tensor: Tensor) -> int | None:
        """Which of ``tensors`` has the tensor's memory; None if none, and so training may change it."""
        return self._own.get(tensor.untyped_storage().data_ptr())

    def _take(self, count: int) -> Tensor:
        if self._staged is None:
            return self._plain(count)
        return self._noted(self._staged.take(count * _FLOAT).view(torch.float32))

    def _plain(self, count: int) -> Tensor:
        return self._noted(torch.empty(count, dtype=torch.float32))

    def _noted(self, tensor: Tensor) -> Tensor:
        if tensor.numel():  # empty ones have no address
            self._own[tensor.untyped_storage().data_ptr()] = len(self.tensors)
        self.tensors.append(tensor)
        return tensor
