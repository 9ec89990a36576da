"""Saves model and optimizer shards in megatron's ``torch_dist`` format, while training continues or while it waits.

Megatron-core's own asynchronous save (0.16.1) cannot be used: ``.to("cpu")`` of a tensor on the CPU is the same memory,
which the next step changes, and its writers are forked next to gloo's and CUDA's threads, or switch Python's garbage
collector off for the whole process. So tensors are copied here, and a thread writes them.

Every rank calls `save_shards`, and later `ShardSave.durable`. The caller makes the folder atomic: shards are a part of
a checkpoint.

The first save of a learner finds a plan for its state, and later ones use it again.

Megatron (0.16.1) tells all ranks of every shard and checks that they cover each tensor, at each save: 0.2 ms of Python
for a shard, on rank 0 for those of all ranks, while training waits. That holds as long as parameters and buffers are
the same tensors in the same memory. Every rank calls all functions here.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from rl_megatron.digests import Digest, SaveDigests, digests
from rl_megatron.errors import CheckpointError
from rl_megatron.learner.checkpoint.loading import READS_WITHOUT_COMMON, first_line, write_error_reason
from rl_megatron.learner.checkpoint.state import (
    COMMON,
    METADATA,
    GatheredState,
    Live,
    Values,
    common_state,
    distributed_parts,
    inner,
    sharded_state,
)
from rl_megatron.learner.optimizer import inner_optimizers
from rl_megatron.observability import activity
from rl_megatron.weights.bytes.parked import StagingPool


@dataclass(slots=True, kw_only=True)
class StartedSave:
    """A save with known shards: megatron's ``writer`` of this rank's and, on rank 0, the ``common`` state to write as
    well. ``finalize`` writes what says where each is, in this order, after all ranks' shards."""

    writer: Any
    finalize: Sequence[Callable[[], None]]
    gathered: GatheredState
    common: dict[str, Any] | None = None  # None: it is written already


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of an item's values: in one of the tensors of a save, from that one's first element on."""

    is_copied: bool  # one of `GatheredState.tensors`, else of the plan's
    number: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[self.number]
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The source of each item of this rank's file, and megatron's description of all ranks'."""

    name: str  # the file's name
    items: Sequence[tuple[WriteItem, _Place]]
    live: Sequence[Tensor]  # tensors that the model and not `GatheredState` holds
    strategy: Any
    described: tuple[Any, Any]  # the metadata of all ranks' shards, on rank 0, and megatron's wrapper of its group
    standing: Sequence[tuple[object, ...]]
    kept: Sequence[Tensor]  # the tensors of ``standing``, so that no other object gets their ids

    def reuse(self, folder: Path, optimizer: MegatronOptimizer, values: Values, gathered: GatheredState) -> StartedSave:
        """Begins a save into ``folder``, whose ``common`` rank 0 alone has: others' may lack parts of the optimizer."""
        common = common_state(optimizer, values, gathered)  # all ranks gather it
        held = [values(tensor) for tensor in self.live]
        writer: Any = FileSystemWriterAsync(folder, thread_count=1)
        writer.set_up_storage_writer(dist.get_rank() == 0)
        items = [(item, place.of(gathered.tensors if place.is_copied else held)) for item, place in self.items]
        writer.write_buckets = [(str(folder / self.name), self.name, items)] if items else []
        writer.results_queue = SimpleQueue() if items else None
        request = self.strategy._get_save_and_finalize_callbacks(writer, (writer, *self.described))
        finalize = [*request.finalize_fns, partial(self._say_format, folder)]
        return StartedSave(
            writer=writer, finalize=finalize, gathered=gathered, common=common if dist.get_rank() == 0 else None
        )

    def _say_format(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig(self.strategy.backend, self.strategy.version), str(folder))
        dist.barrier()


@dataclass(slots=True)
class CachedPlan:
    """The plan of a learner's saves, once one was made."""

    plan: ShardPlan | None = None
    num_created: int = field(default=0, init=False)  # plans
    _requested: tuple[list[tuple[object, ...]], list[Tensor]] = field(default=([], []), init=False)  # `_standing`

    def agreed(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, more: Mapping[str, Any] | None
    ) -> ShardPlan | None:
        """The plan, if it still fits the state of every rank, and ``more`` sharded tensors are those that it has."""
        self._requested = _standing(chunks, optimizer, more)  # a save that megatron plans cuts ``more`` otherwise
        fits = self.plan is not None and self.plan.standing == self._requested[0]
        everywhere = torch.tensor(int(fits), device=next(inner(chunks[0]).parameters()).device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if not everywhere.item():
            self.plan = None
        return self.plan

    def learn(self, optimizer: MegatronOptimizer, strategy: Any, started: StartedSave, live: Sequence[Live]) -> None:
        """Makes a plan of a save that ``strategy`` planned after `agreed` found none. There is none where items are
        objects, which may change (megatron-core 0.19 has one on some rank), or where the optimizer is not distributed.
        """
        if READS_WITHOUT_COMMON:
            return
        found = [(name, items) for _, name, items in started.writer.write_buckets]
        name, items = found[0] if found else ("", [])
        places = _places(items, live, started.gathered)
        if len(distributed_parts(optimizer)) < len(inner_optimizers(optimizer)) or places is None:
            return
        standing, kept = self._requested
        self.plan = ShardPlan(
            name=name,
            items=[(item, place) for (item, _), place in zip(items, places, strict=True)],
            live=[tensor for tensor, _ in live],
            strategy=strategy,
            described=strategy.described,
            standing=standing,
            kept=kept,
        )
        self.num_created += 1


def _standing(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, more: Mapping[str, Any] | None
) -> tuple[list[tuple[object, ...]], list[Tensor]]:
    """Returns which tensors the model's parameters and buffers are, and where their memory and that of ``more`` is; and
    these tensors."""
    tensors = [t for chunk in chunks for t in (*inner(chunk).parameters(), *inner(chunk).buffers())]
    found: list[tuple[object, ...]] = [
        (id(t), t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype) for t in tensors
    ]
    found += [(id(part), *map(id, part.buffers)) for part in distributed_parts(optimizer)]
    beside = [part.data for part in nested_values(more or {}) if isinstance(part, ShardedBase)]
    found += [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.dtype) for t in beside]
    return found, [*tensors, *beside]


def _places(
    items: Sequence[tuple[WriteItem, Any]], live: Sequence[Live], gathered: GatheredState
) -> list[_Place] | None:
    """Returns the place of each item; None if one is not a tensor, or its memory is unknown."""
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
    """Returns the tensors that begin where ``data`` does or before, the nearest first."""
    end = bisect.bisect_right(starts, (data.data_ptr(), len(starts)))
    return [number for _, number in reversed(starts[max(0, end - _NEAREST) : end])]


_NEAREST = 64  # a parameter that is saved whole and in parts begins with at most so many of these


def _holds(tensor: Tensor, data: Tensor) -> bool:
    ends = [t.data_ptr() + t.itemsize * _span(t) for t in (data, tensor)]
    return tensor.dtype == data.dtype and tensor.data_ptr() <= data.data_ptr() and ends[0] <= ends[1]


def _span(tensor: Tensor) -> int:
    """Returns the number of elements from the first to one past the last."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))


_SHARDS = ".distcp"
_ALIGNED = 256
_BUILT_IN = {"async_strategy": "mcore"}  # megatron-core 0.19 asks for a package of NVIDIA's otherwise
_BUILT_IN = {k: v for k, v in _BUILT_IN.items() if k in inspect.signature(dist_checkpointing.save).parameters}


class _Strategy(TorchDistSaveShardedStrategy):
    """Plans a save of one file a rank, and leaves the writing to `ShardSave`."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.writer: Any = None
        self.described: Any = None  # the metadata of all ranks' shards, and megatron's wrapper of its group

    def _get_save_and_finalize_callbacks(self, writer: Any, described: Any, *others: Any) -> Any:
        self.writer, self.described = writer, tuple(described[1:])
        return super()._get_save_and_finalize_callbacks(writer, described, *others)


def _prepare_without_copy(writer: Any, plan: SavePlan, planner: SavePlanner) -> None:
    """Replaces ``FileSystemWriterAsync.prepare_write_data``, which clones views of the host's memory."""
    name = f"{plan.storage_data.prefix}0{_SHARDS}"
    items = [(item, planner.resolve_data(item)) for item in plan.items]
    writer.write_buckets = [(os.path.join(writer.checkpoint_dir, name), name, items)] if items else []
    writer.results_queue = SimpleQueue() if items else None


@contextlib.contextmanager
def _keeping() -> Iterator[None]:
    before = FileSystemWriterAsync.prepare_write_data
    FileSystemWriterAsync.prepare_write_data = _prepare_without_copy
    try:
        yield
    finally:
        FileSystemWriterAsync.prepare_write_data = before


def save_shards(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    kept: CachedPlan,
    values: Values,
    staged: StagingPool | None,
    more: Mapping[str, Any] | None = None,
) -> ShardSave:
    """Saves this rank's shards, and those of ``more``, into the existing ``folder``, by the plan that was ``kept`` of a
    save before, if it fits.

    With ``staged`` it returns once they are copied there, and a thread writes them; else once they are written.
    ``values`` gives the tensor with the values of one that holds none now. Raises CheckpointError.
    """
    if staged is not None:
        staged.begin()
    gathered = GatheredState(staged)
    plan = kept.agreed(chunks, optimizer, more)
    if plan is not None:
        with explained(folder):
            begun = plan.reuse(folder, optimizer, values, gathered)
    else:
        begun = _begin(folder, chunks, optimizer, kept, values, gathered, more)
    if staged is not None:
        _copy(begun.writer, gathered, staged)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return ShardSave(folder, begun, waits=staged is None)


def _begin(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    kept: CachedPlan,
    values: Values,
    gathered: GatheredState,
    more: Mapping[str, Any] | None,
) -> StartedSave:
    """Makes megatron plan a save, and keeps the plan."""
    strategy, live = _Strategy(), list[Live]()
    with explained(folder), _keeping():
        request = dist_checkpointing.save(
            sharded_state(chunks, optimizer, values=values, gathered=gathered, live=live, more=more),
            str(folder),
            sharded_strategy=strategy,
            async_sharded_save=True,
            content_metadata=dict(METADATA),
            **_BUILT_IN,
        )
    begun = StartedSave(writer=strategy.writer, finalize=request.finalize_fns, gathered=gathered)
    kept.learn(optimizer, strategy, begun, live)
    return begun


class ShardSave:
    """A save of this rank's shards that is being written."""

    _latest: threading.Event | None = None  # set once this process's last save has gathered: all ranks' in one order

    def __init__(self, folder: Path, started: StartedSave, *, waits: bool) -> None:
        self._folder, self._begun, self._writer = folder, started, started.writer
        self._files: dict[str, Digest] = {}
        self._error: Exception | None = None
        self._done, self._seconds = 0, 0.0
        self._thread, self._has_gathered = threading.Thread(target=lambda: None), threading.Event()
        if waits:
            self._write(tell=True)
            return
        self._thread = threading.Thread(target=self._write_after, args=(ShardSave._latest,), name="save", daemon=True)
        ShardSave._latest = self._has_gathered
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """True if this rank's shards are written and synced, or could not be."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns once it is `is_written`. Not collective; what the thread writes counts as this rank's activity."""
        seen = -1
        while self._thread.is_alive():
            self._thread.join(1.0)
            if self._done != seen:
                seen = self._done
                activity.part("shards are written")

    def finalize(self) -> SaveDigests:
        """Waits until the shards of all ranks are written, and writes what says where each is. Every rank calls it.

        The others wait in a collective for the slowest, within its time limit: `wait` on every rank has none. Raises
        CheckpointError that says why nothing could be written.
        """
        self.wait()
        with explained(self._folder, self._error):
            for finalize in self._begun.finalize:
                finalize()
            if self._error is not None:  # megatron does not know the error of a rank without shards
                raise self._error
            others = () if dist.get_rank() else sorted(p.name for p in self._folder.iterdir() if p.suffix != _SHARDS)
            return SaveDigests(files=self._files | digests(self._folder, others), seconds=self._seconds)

    def _write_after(self, before: threading.Event | None) -> None:
        """Gathers once the last save has: not once it is written, as peers wait for this rank's part, with a limit."""
        if before is not None:
            before.wait()
        self._write(tell=False)

    def _write(self, *, tell: bool) -> None:
        """Gathers, writes and syncs this rank's file. ``tell``: in the main thread, and as its activity."""
        began, results = time.perf_counter(), self._writer.results_queue
        try:
            try:
                self._begun.gathered.gather()
            finally:
                self._has_gathered.set()
            if self._begun.common is not None:
                torch.save(self._begun.common, self._folder / COMMON)
            for path, name, items in self._writer.write_buckets:
                with open(path, "wb") as file:
                    said = [self._write_one(file, name, item, data) for item, data in items]
                    file.flush()
                    os.fsync(file.fileno())
                self._files |= digests(self._folder, [name], tell=activity.part if tell else _untold)
                results.put({0: said})
        except Exception as error:  # noqa: BLE001  a thread's, which `finalize` raises
            self._error = _with_reason(self._folder, error)
            if results is not None:
                results.put(self._error)
        finally:
            self._writer.write_buckets = self._writer.write_buckets and [()]  # megatron counts them
            self._begun.gathered.tensors.clear()
            self._seconds = time.perf_counter() - began

    def _write_one(self, file: Any, name: str, item: WriteItem, data: Any) -> Any:
        self._done += 1
        alone = data if item.type == WriteItemType.BYTE_IO else _copy_storage(data.detach().cpu())
        return _write_item(self._writer.transforms, file, alone, item, name, SerializationFormat.TORCH_SAVE)


@contextlib.contextmanager
def explained(folder: Path, known: Exception | None = None) -> Iterator[None]:
    """Raises what is ``known``, or else an error that says why the file system refuses to write here."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        if known is not None:
            raise known from error
        raise _with_reason(folder, error) from error


def _with_reason(folder: Path, error: BaseException) -> Exception:
    why = write_error_reason(folder, error)
    if why is None:  # a peer knows
        return RuntimeError(f"{folder} could not be written: {first_line(error)}")
    return CheckpointError(
        f"{folder} cannot be written: {why}; free space or raise the quota, then --resume continues from the "
        "previous checkpoint"
    )


def _copy(writer: Any, gathered: GatheredState, staged: StagingPool) -> None:
    """Puts copies in place of the tensors that training changes: all but those that ``gathered`` made."""
    for path, name, items in writer.write_buckets:
        live = [d.nbytes for i, d in items if _is_live(i, d, gathered)]
        room, at, copied = staged.allocate(sum(map(_aligned, live))), 0, []
        for item, data in items:
            held = data
            if _is_live(item, data, gathered):
                held = room[at : at + data.nbytes].view(data.dtype).view(data.shape)
                held.copy_(data.detach(), non_blocking=True)
                at += _aligned(data.nbytes)
            copied.append((item, held))
        writer.write_buckets = [(path, name, copied)]


def _is_live(item: WriteItem, data: Any, gathered: GatheredState) -> bool:
    return item.type != WriteItemType.BYTE_IO and gathered.number(data) is None


def _copy_storage(tensor: Tensor) -> Tensor:
    """``tensor``, of the host, in a storage with nothing else, which torch would write too. Contiguous ones share their
    memory with it, as long as ``tensor`` lives."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.nbytes or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _untold(name: str, of: str) -> None:
    """Leaves this process's activity to its main thread."""
