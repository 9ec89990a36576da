"""Saves model and optimizer shards in megatron's ``torch_dist`` format, while training goes on or while it waits.

Megatron-core's own asynchronous save (0.16.1) cannot be used: ``.to("cpu")`` of a tensor on the CPU is the same memory,
which the next step changes, and its writers are forked beside gloo's and CUDA's threads, or switch Python's garbage
collector off for the whole process. So tensors are copied here, and a thread writes them.

Every rank calls `save_shards`, and later `ShardSave.durable`. The caller makes the folder atomic: shards are a part of
a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from rl_megatron.digests import Digest, Written, digests
from rl_megatron.errors import CheckpointError
from rl_megatron.learner.checkpoint.faults import told, why_not_written
from rl_megatron.learner.checkpoint.gathered import Gathered
from rl_megatron.learner.checkpoint.planned import Begun, Kept
from rl_megatron.learner.checkpoint.state import COMMON, METADATA, Live, Values, sharded_state
from rl_megatron.observability import activity
from rl_megatron.weights.bytes.staged import Staged

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


def _keep(writer: Any, plan: SavePlan, planner: SavePlanner) -> None:
    """Replaces ``FileSystemWriterAsync.prepare_write_data``, which clones views of the host's memory."""
    name = f"{plan.storage_data.prefix}0{_SHARDS}"
    items = [(item, planner.resolve_data(item)) for item in plan.items]
    writer.write_buckets = [(os.path.join(writer.checkpoint_dir, name), name, items)] if items else []
    writer.results_queue = SimpleQueue() if items else None


@contextlib.contextmanager
def _keeping() -> Iterator[None]:
    before = FileSystemWriterAsync.prepare_write_data
    FileSystemWriterAsync.prepare_write_data = _keep
    try:
        yield
    finally:
        FileSystemWriterAsync.prepare_write_data = before


def save_shards(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    kept: Kept,
    values: Values,
    staged: Staged | None,
    more: Mapping[str, Any] | None = None,
) -> ShardSave:
    """Save this rank's shards, and those of ``more``, into the existing ``folder``, by the plan that was ``kept`` of a
    save before, if it fits.

    With ``staged`` it returns once they are copied there, and a thread writes them; else once they are written.
    ``values`` gives the tensor with the values of one that holds none now. Raises CheckpointError.
    """
    if staged is not None:
        staged.begin()
    gathered = Gathered(staged)
    plan = kept.agreed(chunks, optimizer, more)
    if plan is not None:
        with explained(folder):
            begun = plan.again(folder, optimizer, values, gathered)
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
    kept: Kept,
    values: Values,
    gathered: Gathered,
    more: Mapping[str, Any] | None,
) -> Begun:
    """Have megatron plan a save, and keep the plan."""
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
    begun = Begun(writer=strategy.writer, finalize=request.finalize_fns, gathered=gathered)
    kept.learn(optimizer, strategy, begun, live)
    return begun


class ShardSave:
    """A save of this rank's shards that is being written."""

    _latest: threading.Event | None = None  # set once this process's last save has gathered: all ranks' in one order

    def __init__(self, folder: Path, begun: Begun, *, waits: bool) -> None:
        self._folder, self._begun, self._writer = folder, begun, begun.writer
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
    def written(self) -> bool:
        """Whether this rank's shards are written and synced, or could not be."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return once it is `written`. Not collective; what the thread writes counts as this rank's activity."""
        seen = -1
        while self._thread.is_alive():
            self._thread.join(1.0)
            if self._done != seen:
                seen = self._done
                activity.part("shards are written")

    def durable(self) -> Written:
        """Wait until the shards of all ranks are written, and write what says where each is. Every rank calls it.

        The others wait in a collective for the slowest, within its time limit: `wait` on every rank has none. Raises
        CheckpointError that says why nothing could be written.
        """
        self.wait()
        with explained(self._folder, self._error):
            for finalize in self._begun.finalize:
                finalize()
            if self._error is not None:  # of a rank without shards, of which megatron does not know
                raise self._error
            others = () if dist.get_rank() else sorted(p.name for p in self._folder.iterdir() if p.suffix != _SHARDS)
            return Written(files=self._files | digests(self._folder, others), seconds=self._seconds)

    def _write_after(self, before: threading.Event | None) -> None:
        """Gather once the save before has: not once it is written, as peers wait for this rank's part, with a limit."""
        if before is not None:
            before.wait()
        self._write(tell=False)

    def _write(self, *, tell: bool) -> None:
        """Gather, write and sync this rank's file. ``tell``: in the main thread, whose activity it is."""
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
        except Exception as error:  # noqa: BLE001  a thread's, which `durable` raises
            self._error = _with_reason(self._folder, error)
            if results is not None:
                results.put(self._error)
        finally:
            self._writer.write_buckets = self._writer.write_buckets and [()]  # megatron counts them
            self._begun.gathered.tensors.clear()
            self._seconds = time.perf_counter() - began

    def _write_one(self, file: Any, name: str, item: WriteItem, data: Any) -> Any:
        self._done += 1
        alone = data if item.type == WriteItemType.BYTE_IO else _alone(data.detach().cpu())
        return _write_item(self._writer.transforms, file, alone, item, name, SerializationFormat.TORCH_SAVE)


@contextlib.contextmanager
def explained(folder: Path, known: Exception | None = None) -> Iterator[None]:
    """Raise what is ``known``, or else an error that says why the file system refuses to write here."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        if known is not None:
            raise known from error
        raise _with_reason(folder, error) from error


def _with_reason(folder: Path, error: BaseException) -> Exception:
    why = why_not_written(folder, error)
    if why is None:  # a peer knows
        return RuntimeError(f"{folder} could not be written: {told(error)}")
    return CheckpointError(
        f"{folder} cannot be written: {why}; free space or raise the quota, then --resume continues from the "
        "previous checkpoint"
    )


def _copy(writer: Any, gathered: Gathered, staged: Staged) -> None:
    """Put copies in place of the tensors that training changes: all but those that ``gathered`` made."""
    for path, name, items in writer.write_buckets:
        live = [d.nbytes for i, d in items if _is_live(i, d, gathered)]
        room, at, copied = staged.take(sum(map(_aligned, live))), 0, []
        for item, data in items:
            held = data
            if _is_live(item, data, gathered):
                held = room[at : at + data.nbytes].view(data.dtype).view(data.shape)
                held.copy_(data.detach(), non_blocking=True)
                at += _aligned(data.nbytes)
            copied.append((item, held))
        writer.write_buckets = [(path, name, copied)]


def _is_live(item: WriteItem, data: Any, gathered: Gathered) -> bool:
    return item.type != WriteItemType.BYTE_IO and gathered.number(data) is None


def _alone(tensor: Tensor) -> Tensor:
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
    """Leave this process's activity to its main thread."""
