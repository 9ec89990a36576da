"""Saves and loads model and optimizer shards with megatron's dist_checkpointing; another layout can load them.

Every rank calls `save` and both loads. The caller makes the folder atomic: shards are only a part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from rl_megatron.digests import Digest, digests
from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.learner.adam.float8 import as_float32
from rl_megatron.learner.adam.groups import add_missing, own_settings
from rl_megatron.learner.muon.shared import LayerWise
from rl_megatron.learner.optimizer import copy_to_host, create_state, inner_optimizers, keeps_weights
from rl_megatron.weights.bytes.bits import all_numbers

# The default sharding of DistributedOptimizer is broken in 0.16.1; this one saves each parameter's state under its
# global name and box, so that any layout can load it.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")  # a rank's shard files, as torch's FileSystemWriter names them

_COMMON = "common.pt"  # what belongs to no rank, where a checkpoint was written by megatron-core 0.16
_READS_WITHOUT_COMMON = hasattr(serialization, "_legacy_common_state_exists")  # newer ones read both forms

_NAMED = 5  # an error names at most so many tensors
_PROBE_BYTES = 4 << 20

# Megatron's queue lives in a process of its own, which outlives a killed rank.
filesystem_async._results_queue = queue.SimpleQueue()


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Writes in this process. Megatron's own strategy forks writers at each save, beside gloo's and CUDA's threads."""

    def _get_save_and_finalize_callbacks(self, writer: Any, *others: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, *others)
        return request._replace(async_fn=partial(_write, writer) if writer.write_buckets else None)


def _write(writer: Any, rank: int, buckets: list[Any], results: queue.SimpleQueue[Any]) -> None:
    """Replaces ``FileSystemWriterAsync.write_preloaded_data_multiproc``: writes and syncs one file a bucket."""
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
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    *,
    loading: bool,
    values: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> dict[str, Any]:
    """``values`` gives the tensor with the values of one that holds none now."""
    create_state(optimizer)
    state: dict[str, Any] = {_key(i, len(chunks)): _weights(chunk) for i, chunk in enumerate(chunks)}
    models = state["model"] if len(chunks) == 1 else dict(state)
    with _gathering(optimizer, values):
        state["optimizer"] = optimizer.sharded_state_dict(models, is_loading=loading, metadata=dict(_METADATA))
    for part in nested_values(state):
        if isinstance(part, ShardedBase) and isinstance(part.data, Tensor):
            part.data = values(part.data)
    return state


@contextlib.contextmanager
def _gathering(optimizer: MegatronOptimizer, values: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Has a distributed optimizer gather ``values`` of its shards."""
    parts = [part for part in inner_optimizers(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part._get_main_param_and_optimizer_states = partial(_values_of, values, part)
    yield
    for part in parts:
        del part._get_main_param_and_optimizer_states


def _values_of(values: Callable[[Tensor], Tensor], part: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    if keeps_weights(part):
        group, order = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        held = {name: as_float32(tensor, values) for name, tensor in state.items()}
        return {"param": held.pop("master_param"), **held}
    held = DistributedOptimizer._get_main_param_and_optimizer_states(part, parameter)
    return {name: values(tensor) for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _weights(chunk: Any, without: str | None = None) -> dict[str, Any]:
    """The parameters and buffers of a chunk that a checkpoint holds, except names that begin with ``without``."""
    found = _inner(chunk).sharded_state_dict(metadata=dict(_METADATA)).items()
    return {name: part for name, part in found if not _left_out(name, without)}


def _left_out(name: str, without: str | None) -> bool:
    """No checkpoint holds TransformerEngine's fp8 state: recipes here have no scales of earlier steps (`options.fp8`),
    and torch's layers have none."""
    return "_extra_state" in name or bool(without and name.startswith(without))


def _fill(chunk: Any, state: dict[str, Any], where: str, without: str | None = None) -> None:
    """Load ``state`` into the chunk. Raises CheckpointError if either has a tensor that the other lacks."""
    keys = _inner(chunk).load_state_dict(state, strict=False)
    missing = [name for name in keys.missing_keys if not _left_out(name, without)]
    if missing or keys.unexpected_keys:
        raise CheckpointError(
            f"{where} does not fit the model: the checkpoint lacks {missing[:_NAMED]}, and the model lacks "
            f"{keys.unexpected_keys[:_NAMED]}"
        )


def _key(index: int, count: int) -> str:
    return "model" if count == 1 else f"model{index}"


def _inner(chunk: Any) -> Any:
    """The GPTModel inside DDP and, for half precision, Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def save(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    values: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> dict[str, Digest]:
    """Write this rank's shards into the existing ``folder``. Returns the digest of each file it wrote, by name.

    ``values`` gives the tensor with the values of one that holds none now.
    """
    try:
        dist_checkpointing.save(
            _sharded_state(chunks, optimizer, loading=False, values=values),
            str(folder),
            sharded_strategy=_SaveInProcess("torch_dist", 1, thread_count=1),
            content_metadata=dict(_METADATA),
        )
    except (CheckpointException, OSError, RuntimeError) as error:
        why = _why_not_written(folder, error)
        if why is None:  # a peer knows
            raise RuntimeError(f"{folder} could not be written: {_told(error)}") from error
        raise CheckpointError(
            f"{folder} cannot be written: {why}; free space or raise the quota, then --resume continues from the "
            "previous checkpoint"
        ) from error
    return digests(folder, _own_files(folder, dist.get_rank()))


def _own_files(folder: Path, rank: int) -> list[str]:
    """The files that a rank wrote: its shards, and on rank 0 also the files that belong to no rank."""
    shards = {path.name: _SHARD.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return [name for name, shard in shards.items() if rank == (int(shard[1]) if shard else 0)]


def _why_not_written(folder: Path, error: BaseException) -> str | None:
    """The file system's error behind a failed save. torch's zip writer hides it, so a small file is written to see."""
    for one in _causes(error):
        if isinstance(one, OSError) and one.strerror:
            return one.strerror
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as said:
        return said.strerror
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """The exception of every rank that megatron reported here."""
    return [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def _told(error: BaseException) -> str:
    """The first line of the first cause's message; torch appends stacks to it."""
    return (str(next(iter(_causes(error)), "another rank failed")).strip().splitlines() or [type(error).__name__])[0]


def load_weights(folder: Path, chunks: Sequence[DistributedDataParallel], *, without: str | None = None) -> None:
    """Load the model alone from ``folder``, except names that begin with ``without``.

    Raises CheckpointError, or WeightError for NaN and infinite values.
    """
    wanted = {_key(i, len(chunks)): _weights(chunk, without) for i, chunk in enumerate(chunks)}
    state = _read(wanted, folder, "this layout")  # at once: all layers must be asked for, and each chunk has some
    with torch.no_grad():
        for i, chunk in enumerate(chunks):
            _fill(chunk, state[_key(i, len(chunks))], f"{folder}, chunk {i}", without)
            for name, parameter in _inner(chunk).named_parameters():
                if not _left_out(name, without) and not all_numbers(parameter):
                    raise WeightError(f"{folder}: {name} holds NaN or infinite values; fetch or convert it again")


def load(folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Load model and optimizer from ``folder``. Raises CheckpointError if shards are missing or do not fit."""
    state = _read(_sharded_state(chunks, optimizer, loading=True), folder, "this layout")
    with torch.no_grad():
        for i, chunk in enumerate(chunks):
            _fill(chunk, state[_key(i, len(chunks))], f"{folder}, chunk {i}")
        with own_settings(optimizer):
            optimizer.load_state_dict(_in_groups(_in_links(state["optimizer"], optimizer, folder), optimizer))
    copy_to_host(optimizer)


def _in_links(saved: dict[Any, Any], optimizer: MegatronOptimizer, folder: Path) -> dict[Any, Any]:
    """``saved`` with a state for each of the chained optimizers.

    Older versions' checkpoints of ``learner.ep=1`` have one for all parameters: its settings and count of steps are
    those of each. The tensors have been read by their global names, into the states of ``optimizer``'s own chain.
    """
    links = range(len(inner_optimizers(optimizer)))
    if len(links) == 1 or saved.keys() == set(links) or isinstance(optimizer, LayerWise):
        return saved
    if "param_state" not in saved[0]:
        raise CheckpointError(
            f"{folder} was written with learner.ep=1 and learner.optimizer.distributed=false by an older version of "
            "rl_megatron, in another form; resume with that version"
        )
    one = {key: value for key, value in saved.items() if key not in links}
    groups = [
        {**group, "is_expert_parallel": experts}
        for group in one["optimizer"]["param_groups"]
        for experts in (False, True)
    ]
    one["optimizer"] = {**one["optimizer"], "param_groups": groups}
    return {link: {**one, **saved[link]} for link in links}


def _in_groups(saved: dict[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """``saved`` with all groups of parameters: in older versions' checkpoints biases of experts may have none."""
    parts = inner_optimizers(optimizer)
    for link, part in enumerate(parts):
        state = saved if len(parts) == 1 else saved.get(link, {})
        if "param_state" in state:
            add_missing(state["optimizer"]["param_groups"], part.optimizer.param_groups)
    return saved


def _read(wanted: dict[str, Any], folder: Path, into: str) -> dict[str, Any]:
    if not _READS_WITHOUT_COMMON and not (folder / _COMMON).exists() and b"common_state" in _metadata(folder):
        raise CheckpointError(
            f"{folder} has no {_COMMON}: a megatron-core wrote it that is newer than the one here and keeps in shards "
            "what belongs to no rank; resume with the Python and the megatron-core that wrote it"
        )
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except ValueError as error:  # lists of unequal lengths
        raise CheckpointError(
            f"{folder}: megatron cannot load these shards into {into}: {_told(error)[:1000]}. Older versions had other "
            "groups of parameters where learner.optimizer.distributed=false and experts have biases; resume such a run "
            "with the version that wrote it"
        ) from error
    except (CheckpointException, CheckpointingException, OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: megatron cannot load these shards into {into}: {_told(error)[:1000]}"
        ) from error
    return state


def _metadata(folder: Path) -> bytes:
    return path.read_bytes() if (path := folder / ".metadata").exists() else b""
