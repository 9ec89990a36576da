"""Model and optimizer shards through megatron's dist_checkpointing: saved in one layout, readable in another.

Every rank calls both functions; the caller owns the folder's atomicity (learner shards are only part of a checkpoint).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from rl_megatron.errors import CheckpointError
from rl_megatron.learner.optimizer import create_state

# The default sharding of DistributedOptimizer is broken in 0.16.1; this one reshards over TP, PP and EP of equal kind.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


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


def save(folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Write this rank's shards into ``folder`` (which exists)."""
    dist_checkpointing.save(
        _sharded_state(chunks, optimizer, loading=False), str(folder), content_metadata=dict(_METADATA)
    )


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
