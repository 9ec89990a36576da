"""Model and optimizer shards through megatron's dist_checkpointing: saved in one layout, readable in another.

Every rank calls both functions; the caller owns the folder's atomicity (learner shards are only part of a checkpoint).
"""

from __future__ import annotations

import queue
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from rl_megatron.digests import Digest, digests
from rl_megatron.errors import CheckpointError
from rl_megatron.learner.optimizer import create_state

# The default sharding of DistributedOptimizer is broken in 0.16.1; this one reshards over TP, PP and EP of equal kind.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")  # of a rank's shards, as torch's FileSystemWriter names them

# Megatron's queue lives in a process of its own, which outlives a killed rank.
filesystem_async._results_queue = queue.SimpleQueue()


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Writes in this process; megatron's own forks writers, beside the threads of gloo and CUDA, for each save."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        return request._replace(async_fn=partial(_write, writer) if writer.write_buckets else None)


def _write(writer: Any, rank: int, buckets: list[Any], results: queue.SimpleQueue[Any]) -> None:
    """Stands for ``FileSystemWriterAsync.write_preloaded_data_multiproc``: a file for each bucket, synced."""
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    left: queue.Queue[int] = queue.Queue()
    for i, bucket in enumerate(buckets):
        left.put(i)
        writer.write_preloaded_data(transforms, i, bucket, done, left, use_fsync=True)
    written = dict(done.get() for _ in buckets)
    failed = [outcome for outcome in written.values() if isinstance(outcome, Exception)]
    results.put(failed[0] if failed else written)


def _sharded_state(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, *, loading: bool
) -> dict[str, Any]:
    create_state(optimizer)
    state: dict[str, Any] = {
        _key(i, len(chunks)): _inner(chunk).sharded_state_dict(metadata=dict(_METADATA))
        for i, chunk in enumerate(chunks)
    }
    models = state["model"] if len(chunks) == 1 else dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(models, is_loading=loading, metadata=dict(_METADATA))
    return state


def _key(index: int, count: int) -> str:
    return "model" if count == 1 else f"model{index}"


def _inner(chunk: Any) -> Any:
    """The GPTModel inside DDP and, for half precision, Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def save(folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> dict[str, Digest]:
    """Write this rank's shards into ``folder`` (which exists); the digest of each file that is this rank's, by name."""
    dist_checkpointing.save(
        _sharded_state(chunks, optimizer, loading=False),
        str(folder),
        sharded_strategy=_SaveInProcess("torch_dist", 1, thread_count=1),
        content_metadata=dict(_METADATA),
    )
    return digests(folder, _own_files(folder, dist.get_rank()))


def _own_files(folder: Path, rank: int) -> list[str]:
    """What a rank wrote: its shards and, rank 0, all that is nobody's."""
    shards = {path.name: _SHARD.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return [name for name, shard in shards.items() if rank == (int(shard[1]) if shard else 0)]


def load_weights(folder: Path, chunks: Sequence[DistributedDataParallel], *, without: str | None = None) -> None:
    """Fill the model alone from ``folder``, leaving names that begin with ``without``. Raises CheckpointError."""
    for i, chunk in enumerate(chunks):
        model = _inner(chunk)
        wanted = {
            name: part
            for name, part in model.sharded_state_dict(metadata=dict(_METADATA)).items()
            if not name.endswith("_extra_state") and not (without and name.startswith(without))
        }
        try:
            state = dist_checkpointing.load({"model": wanted}, str(folder))
        except (CheckpointingException, OSError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{folder}: megatron cannot load these shards into chunk {i}: {error}") from error
        with torch.no_grad():
            model.load_state_dict(state["model"], strict=False)


def load(folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Fill model and optimizer from ``folder``. Raises CheckpointError where shards are missing or do not fit."""
    wanted = _sharded_state(chunks, optimizer, loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(folder))
    except (CheckpointingException, OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{folder}: megatron cannot load these shards into this layout: {error}") from error
    with torch.no_grad():
        for i, chunk in enumerate(chunks):
            _inner(chunk).load_state_dict(state[_key(i, len(chunks))])
        optimizer.load_state_dict(state["optimizer"])
