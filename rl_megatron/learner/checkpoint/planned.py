"""What the first save of a learner finds out about its state, and later ones use again.

Megatron (0.16.1) tells all ranks of every shard and checks that they cover each tensor, at each save: 0.2 ms of Python
for a shard, on rank 0 for those of all ranks, while training waits. That holds as long as parameters and buffers are
the same tensors in the same memory. Every rank calls all functions here.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from rl_megatron.learner.checkpoint.gathered import Gathered
from rl_megatron.learner.checkpoint.loading import READS_WITHOUT_COMMON
from rl_megatron.learner.checkpoint.state import Live, Values, common_state, distributed_parts, inner
from rl_megatron.learner.optimizer import inner_optimizers


@dataclass(slots=True, kw_only=True)
class Begun:
    """A save whose shards are known: megatron's ``writer`` of this rank's and, on rank 0, the ``common`` state to write
    beside them. ``finalize`` writes what says where each is, in this order, after all ranks' shards."""

    writer: Any
    finalize: Sequence[Callable[[], None]]
    gathered: Gathered
    common: dict[str, Any] | None = None  # None: it is written already


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the values of an item are: in one of the tensors of a save, from that one's first element on."""

    made: bool  # one of `Gathered.tensors`, else of the plan's
    number: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[self.number]
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Where each item of this rank's file is from, and megatron's description of all ranks'."""

    name: str  # of the file
    items: Sequence[tuple[WriteItem, _Place]]
    live: Sequence[Tensor]  # what the model and not `Gathered` holds
    strategy: Any
    described: tuple[Any, Any]  # the metadata of all ranks' shards, on rank 0, and megatron's wrapper of its group
    standing: Sequence[tuple[object, ...]]
    kept: Sequence[Tensor]  # those of ``standing``: so nobody else gets their ids

    def again(self, folder: Path, optimizer: MegatronOptimizer, values: Values, gathered: Gathered) -> Begun:
        """Begin a save into ``folder``, whose ``common`` rank 0 alone has: others' may lack parts of the optimizer."""
        common = common_state(optimizer, values, gathered)  # which all ranks gather
        held = [values(tensor) for tensor in self.live]
        writer: Any = FileSystemWriterAsync(folder, thread_count=1)
        writer.set_up_storage_writer(dist.get_rank() == 0)
        items = [(item, place.of(gathered.tensors if place.made else held)) for item, place in self.items]
        writer.write_buckets = [(str(folder / self.name), self.name, items)] if items else []
        writer.results_queue = SimpleQueue() if items else None
        request = self.strategy._get_save_and_finalize_callbacks(writer, (writer, *self.described))
        finalize = [*request.finalize_fns, partial(self._say_format, folder)]
        return Begun(
            writer=writer, finalize=finalize, gathered=gathered, common=common if dist.get_rank() == 0 else None
        )

    def _say_format(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig(self.strategy.backend, self.strategy.version), str(folder))
        dist.barrier()


@dataclass(slots=True)
class Kept:
    """The plan of a learner's saves, once one was made."""

    plan: ShardPlan | None = None
    made: int = field(default=0, init=False)  # plans
    _asked: tuple[list[tuple[object, ...]], list[Tensor]] = field(default=([], []), init=False)  # `_standing`

    def agreed(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, more: Mapping[str, Any] | None
    ) -> ShardPlan | None:
        """The plan, if it still fits the state of every rank, and ``more`` sharded tensors are those that it has."""
        self._asked = _standing(chunks, optimizer, more)  # a save that megatron plans cuts ``more`` otherwise
        fits = self.plan is not None and self.plan.standing == self._asked[0]
        everywhere = torch.tensor(int(fits), device=next(inner(chunks[0]).parameters()).device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if not everywhere.item():
            self.plan = None
        return self.plan

    def learn(self, optimizer: MegatronOptimizer, strategy: Any, begun: Begun, live: Sequence[Live]) -> None:
        """Make a plan of a save that ``strategy`` planned after `agreed` found none. There is none where items are
        objects, which may change (megatron-core 0.19 has one on some rank), or where the optimizer is not distributed.
        """
        if READS_WITHOUT_COMMON:
            return
        found = [(name, items) for _, name, items in begun.writer.write_buckets]
        name, items = found[0] if found else ("", [])
        places = _places(items, live, begun.gathered)
        if len(distributed_parts(optimizer)) < len(inner_optimizers(optimizer)) or places is None:
            return
        standing, kept = self._asked
        self.plan = ShardPlan(
            name=name,
            items=[(item, place) for (item, _), place in zip(items, places, strict=True)],
            live=[tensor for tensor, _ in live],
            strategy=strategy,
            described=strategy.described,
            standing=standing,
            kept=kept,
        )
        self.made += 1


def _standing(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, more: Mapping[str, Any] | None
) -> tuple[list[tuple[object, ...]], list[Tensor]]:
    """Which tensors the model's parameters and buffers are, and where their memory and that of ``more`` is; and these
    tensors."""
    tensors = [t for chunk in chunks for t in (*inner(chunk).parameters(), *inner(chunk).buffers())]
    found: list[tuple[object, ...]] = [
        (id(t), t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype) for t in tensors
    ]
    found += [(id(part), *map(id, part.buffers)) for part in distributed_parts(optimizer)]
    beside = [part.data for part in nested_values(more or {}) if isinstance(part, ShardedBase)]
    found += [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.dtype) for t in beside]
    return found, [*tensors, *beside]


def _places(items: Sequence[tuple[WriteItem, Any]], live: Sequence[Live], gathered: Gathered) -> list[_Place] | None:
    """The place of each item; None if one is no tensor, or in no memory that is known."""
    starts = sorted((held.data_ptr(), number) for number, (_, held) in enumerate(live))
    places = []
    for item, data in items:
        if item.type == WriteItemType.BYTE_IO:
            return None
        made = number = gathered.number(data)
        if number is None:
            number = next((n for n in _around(starts, data) if _holds(live[n][1], data)), None)
        if number is None:
            return None
        tensor = live[number][1] if made is None else gathered.tensors[number]
        offset = (data.data_ptr() - tensor.data_ptr()) // data.itemsize if data.numel() else 0
        places.append(_Place(made is not None, number, offset, data.size(), data.stride()))
    return places


def _around(starts: Sequence[tuple[int, int]], data: Tensor) -> list[int]:
    """The tensors that begin where ``data`` does or before, the nearest first."""
    end = bisect.bisect_right(starts, (data.data_ptr(), len(starts)))
    return [number for _, number in reversed(starts[max(0, end - _NEAREST) : end])]


_NEAREST = 64  # a parameter that is saved whole and in parts begins with at most so many of these


def _holds(tensor: Tensor, data: Tensor) -> bool:
    ends = [t.data_ptr() + t.itemsize * _span(t) for t in (data, tensor)]
    return tensor.dtype == data.dtype and tensor.data_ptr() <= data.data_ptr() and ends[0] <= ends[1]


def _span(tensor: Tensor) -> int:
    """Elements from the first to one past the last."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
