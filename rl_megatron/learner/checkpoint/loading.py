"""Loads model and optimizer shards with megatron's dist_checkpointing, written in this layout or another.

Every rank calls both functions.

Finds why megatron could not write or read a checkpoint: it hides the cause in exceptions of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.learner.checkpoint.state import COMMON, chunk_key, inner, is_excluded, sharded_state, weights
from rl_megatron.learner.optimizer import copy_to_host, inner_optimizers
from rl_megatron.learner.parameters import add_missing, chunk_adapters, is_adapter, keep_group_settings
from rl_megatron.weights.bytes.bits import all_numbers

_PROBE_BYTES = 4 << 20


def write_error_reason(folder: Path, error: BaseException) -> str | None:
    """Returns the file system's error of a failed save. torch's zip writer hides it, so this writes a small file."""
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
    """Returns the exception of every rank that megatron reported here."""
    return [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def first_line(error: BaseException) -> str:
    """Returns the first line of the first cause's message; torch appends stacks to it."""
    return (str(next(iter(_causes(error)), "another rank failed")).strip().splitlines() or [type(error).__name__])[0]


READS_WITHOUT_COMMON = hasattr(serialization, "_legacy_common_state_exists")
"""True if the megatron-core here is a newer one, which reads both forms."""

_NAMED = 5  # an error names at most so many tensors


def load_weights(folder: Path, chunks: Sequence[DistributedDataParallel], *, without: str | None = None) -> None:
    """Loads the model alone from ``folder``, except names that begin with ``without``.

    Raises CheckpointError, or WeightError for NaN and infinite values.
    """
    wanted = {chunk_key(i, len(chunks)): weights(chunk, without) for i, chunk in enumerate(chunks)}
    state = _read(wanted, folder, "this layout")  # one read: all layers must be asked for, and each chunk has some
    with torch.no_grad():
        for i, chunk in enumerate(chunks):
            _fill(chunk, _chunk_state(state, i, chunks), f"{folder}, chunk {i}", adapters=False, without=without)
            model = inner(chunk)
            for name, parameter in model.named_parameters():
                if not is_excluded(name, without) and not is_adapter(model, name) and not all_numbers(parameter):
                    raise WeightError(f"{folder}: {name} holds NaN or infinite values; fetch or convert it again")


def load(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Loads model and optimizer from ``folder``; returns what was read, with that of ``more`` sharded tensors. Raises
    CheckpointError if shards are missing or do not fit."""
    state = _read(sharded_state(chunks, optimizer, more=more), folder, "this layout")
    with torch.no_grad():
        for i, chunk in enumerate(chunks):
            adapters = chunk_adapters(inner(chunk)) is not None  # a chunk may have none
            _fill(chunk, _chunk_state(state, i, chunks), f"{folder}, chunk {i}", adapters=adapters)
        with keep_group_settings(optimizer):
            optimizer.load_state_dict(
                _convert_groups(_per_chained_optimizer(state["optimizer"], optimizer, folder), optimizer)
            )
    copy_to_host(optimizer)
    return state


def _chunk_state(state: dict[str, Any], index: int, chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Megatron leaves out a chunk without tensors: the draft layer's, on stages before the last."""
    found: dict[str, Any] = state.get(chunk_key(index, len(chunks)), {})
    return found


def _fill(chunk: Any, state: dict[str, Any], where: str, *, adapters: bool, without: str | None = None) -> None:
    """Loads ``state``, of the ``adapters`` or of all else, into the chunk. Raises CheckpointError if one has a tensor
    that the other lacks."""
    model = inner(chunk)
    keys = model.load_state_dict(state, strict=False)
    missing = [n for n in keys.missing_keys if not is_excluded(n, without) and is_adapter(model, n) == adapters]
    if missing or keys.unexpected_keys:
        raise CheckpointError(
            f"{where} does not fit the model: the checkpoint lacks {missing[:_NAMED]}, and the model lacks "
            f"{keys.unexpected_keys[:_NAMED]}"
        )


def _per_chained_optimizer(saved: dict[Any, Any], optimizer: MegatronOptimizer, folder: Path) -> dict[Any, Any]:
    """``saved`` with a state for each of the chained optimizers.

    Older versions' checkpoints of ``learner.ep=1`` have one for all parameters: its settings and count of steps are
    those of each. The tensors have been read by their global names, into the states of ``optimizer``'s own chain.
    """
    links = range(len(inner_optimizers(optimizer)))
    if len(links) == 1 or saved.keys() == set(links) or "optimizer" not in saved:  # the last: a feature's
        return saved
    one = {key: value for key, value in saved.items() if key not in links}
    groups = [
        {**group, "is_expert_parallel": experts}
        for group in one["optimizer"]["param_groups"]
        for experts in (False, True)
    ]
    one["optimizer"] = {**one["optimizer"], "param_groups": groups}
    return {link: {**one, **saved[link]} for link in links}


def _convert_groups(saved: dict[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """``saved`` with all groups of parameters: in older versions' checkpoints biases of experts may have none."""
    parts = inner_optimizers(optimizer)
    for link, part in enumerate(parts):
        state = saved if len(parts) == 1 else saved.get(link, {})
        if "param_state" in state:
            add_missing(state["optimizer"]["param_groups"], part.optimizer.param_groups)
    return saved


def _read(wanted: dict[str, Any], folder: Path, into: str) -> dict[str, Any]:
    if not READS_WITHOUT_COMMON and not (folder / COMMON).exists() and b"common_state" in _metadata(folder):
        raise CheckpointError(
            f"{folder} has no {COMMON}: a megatron-core wrote it that is newer than the one here and keeps in shards "
            "what belongs to no rank; resume with the Python and the megatron-core that wrote it"
        )
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except (CheckpointException, CheckpointingException, OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: megatron cannot load these shards into {into}: {first_line(error)[:1000]}"
        ) from error
    return state


def _metadata(folder: Path) -> bytes:
    return path.read_bytes() if (path := folder / ".metadata").exists() else b""
