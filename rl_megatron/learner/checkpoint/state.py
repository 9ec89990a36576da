"""The content of a rank's checkpoint: megatron's sharded tensors of the model's chunks and of the optimizer, and
tensors besides a model's own, cut as these, under other names.

Optimizer states of data-parallel ranks, in the host's memory of the first of them, which writes them.

Megatron (0.16.1, ``get_parameter_state_dp_zero``) copies each state six times before a save has copied it, and all of
that while training waits. Here a shard is copied once; the rest needs no learner and runs in any thread.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rl_megatron.errors import CheckpointError
from rl_megatron.learner.optimizer import create_state, inner_optimizers, stores_master_weights
from rl_megatron.learner.parameters import chunk_adapters, global_name, is_adapter, swapped
from rl_megatron.weights.bytes.parked import StagingPool
from rl_megatron.weights.checkpoints.megatron import BESIDE
from rl_megatron.weights.checkpoints.torch_dist import read_index

_KEYS = ("param", "exp_avg", "exp_avg_sq")  # float32 weights and moments
_FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A state of one buffer: this rank's shards of its buckets, and on the first rank the whole."""

    group: dist.ProcessGroup
    shards: Tensor
    whole: Tensor | None
    buckets: tuple[int, ...]  # elements of each, which ranks share evenly


class GatheredState:
    """States of one save. ``staged`` gives the memory of what is copied; without it memory is the save's own."""

    def __init__(self, staged: StagingPool | None) -> None:
        self._staged, self._sent = staged, list[_Sent]()
        self.tensors: list[Tensor] = []  # flat float32, each in its own storage, in the same order in each save
        self._own = dict[int, int]()  # the number of each of their storages

    def collect(self, part: DistributedOptimizer, **_: Any) -> dict[Any, Any] | None:
        """Copies this rank's shards. Returns megatron's form of the states of all ranks on the first, else
        None; with several ranks they are undefined until `gather`. Every rank calls it."""
        group: dist.ProcessGroup = part.data_parallel_group_gloo
        first = group.rank() == 0
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, (buffer, by_dtype) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
            ((dtype, ranges),) = by_dtype.items()
            sizes = tuple(bucket.grad_data.numel() for bucket in buffer.buckets)
            shards = {key: self._take(sum(sizes) // group.size()) for key in _KEYS}
            whole = {key: shards[key] if group.size() == 1 else self._new_buffer(sum(sizes)) for key in _KEYS if first}
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
        """Sends the shards to each group's first rank, over gloo groups that nothing else uses. Every rank calls it,
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
        """Returns which of ``tensors`` has the tensor's memory; None if none has, and so training may change it."""
        return self._own.get(tensor.untyped_storage().data_ptr())

    def _take(self, count: int) -> Tensor:
        if self._staged is None:
            return self._new_buffer(count)
        return self._noted(self._staged.allocate(count * _FLOAT).view(torch.float32))

    def _new_buffer(self, count: int) -> Tensor:
        return self._noted(torch.empty(count, dtype=torch.float32))

    def _noted(self, tensor: Tensor) -> Tensor:
        if tensor.numel():  # empty ones have no address
            self._own[tensor.untyped_storage().data_ptr()] = len(self.tensors)
        self.tensors.append(tensor)
        return tensor


# The default sharding of DistributedOptimizer is broken in 0.16.1; this one saves each parameter's state under its
# global name and box, so that any layout can load it.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
COMMON = "common.pt"
"""The file of the state that belongs to no shard, in checkpoints that megatron-core 0.16 wrote."""
Values = Callable[[Tensor], Tensor]
"""Gives the tensor with the values of one that holds none now."""
Live = tuple[Tensor, Tensor]
"""A tensor of the model or the optimizer, and the one with its values."""


def sharded_state(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    *,
    values: Values = lambda tensor: tensor,
    gathered: GatheredState | None = None,
    live: list[Live] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the state to save, whose optimizer states `gathered` collects, or, without it, the state to load into;
    and ``more`` sharded tensors.

    Appends the tensors that `gathered` did not make to ``live``.
    """
    create_state(optimizer)
    held = {chunk_key(i, len(chunks)): trained(chunk) for i, chunk in enumerate(chunks)}
    state: dict[str, Any] = {
        key: tensors for key, tensors in held.items() if tensors
    }  # not all have drafts or adapters
    models = state.get("model", {}) if len(chunks) == 1 else dict(state)
    with _collecting(optimizer, values, gathered):
        state["optimizer"] = optimizer.sharded_state_dict(models, is_loading=gathered is None, metadata=dict(METADATA))
    state |= more or {}
    for part in nested_values(state):
        if isinstance(part, ShardedBase) and isinstance(part.data, Tensor):
            tensor, part.data = part.data, values(part.data)
            if live is not None and (gathered is None or gathered.number(part.data) is None):
                live.append((tensor, part.data))
    return state


def common_state(optimizer: MegatronOptimizer, values: Values, gathered: GatheredState) -> dict[str, Any]:
    """Returns a copy of the state to save that belongs to no shard; `gathered` collects the rest of the optimizer's.

    All parts of the optimizer must be distributed.
    """
    create_state(optimizer)
    parts = distributed_parts(optimizer)
    for part in parts:
        part.sharded_param_state_fully_reshardable = partial(_collect, gathered, part)
    try:
        with _collecting(optimizer, values, gathered):
            state = optimizer.sharded_state_dict({}, is_loading=False, metadata=dict(METADATA))
    finally:
        for part in parts:
            del part.sharded_param_state_fully_reshardable
    for part, of_part in zip(parts, [state] if len(parts) == 1 else state.values(), strict=True):
        of_part["param_state"] = {}
        if any(buffer.params for buffer in part.buffers):  # else megatron finds no shard there, and keeps it
            del of_part["param_state"]
    return copy.deepcopy({"optimizer": state, "content_metadata": dict(METADATA)})


def _collect(gathered: GatheredState, part: DistributedOptimizer, *_: Any) -> None:
    gathered.collect(part)


def distributed_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Returns the `inner_optimizers` that are distributed."""
    return [part for part in inner_optimizers(optimizer) if isinstance(part, DistributedOptimizer)]


@contextlib.contextmanager
def _collecting(optimizer: MegatronOptimizer, values: Values, gathered: GatheredState | None) -> Iterator[None]:
    """Context in which a distributed optimizer's states are ``values``, which `gathered` collects."""
    parts = distributed_parts(optimizer)
    for part in parts:
        part._get_main_param_and_optimizer_states = partial(_values_of, values, part)
        if gathered is not None:
            part.get_parameter_state_dp_zero = partial(gathered.collect, part)
    if gathered is not None:  # megatron collects garbage for each part, most of the time for which training would wait
        distrib_optimizer.gc = SimpleNamespace(collect=lambda: 0)
    try:
        yield
    finally:
        distrib_optimizer.gc = gc
        for part in parts:
            del part._get_main_param_and_optimizer_states
            part.__dict__.pop("get_parameter_state_dp_zero", None)


def _values_of(values: Values, part: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    if stores_master_weights(part.optimizer):
        group, order = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        held = {name: values(tensor).float() for name, tensor in state.items()}
        return {"param": held.pop("master_param"), **held}
    held = DistributedOptimizer._get_main_param_and_optimizer_states(part, parameter)
    return {name: values(tensor) for name, tensor in held.items() if isinstance(tensor, Tensor)}


def trained(chunk: Any) -> dict[str, Any]:
    """Returns the parameters and buffers of a chunk that a run saves: the adapters if it has some, else all."""
    found = chunk_adapters(inner(chunk))
    return weights(chunk) if found is None else found.sharded_state_dict()


def weights(chunk: Any, without: str | None = None) -> dict[str, Any]:
    """Returns the parameters and buffers of a chunk's model, except adapters and names that begin with ``without``."""
    model = inner(chunk)
    found = model.sharded_state_dict(metadata=dict(METADATA)).items()
    return {name: part for name, part in found if not is_excluded(name, without) and not is_adapter(model, name)}


def is_excluded(name: str, without: str | None) -> bool:
    """True if ``name`` is left out: it begins with ``without``, or is TransformerEngine's fp8 state, which no
    checkpoint holds. Recipes here have no scales of earlier steps (`_kernel_keywords`), nor have torch's layers."""
    return "_extra_state" in name or bool(without and name.startswith(without))


def chunk_key(index: int, count: int) -> str:
    """Returns the name of one of ``count`` chunks in a checkpoint."""
    return "model" if count == 1 else f"model{index}"


def inner(chunk: Any) -> Any:
    """Returns the GPTModel inside DDP and, for half precision, Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraState:
    """Tensors under the global names, and in the shapes, of a model's parameters, for each of some names.

    ``values`` gives the tensor with the values of one that holds none now.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Values

    def state(self, models: Sequence[GPTModel]) -> dict[str, Any]:
        """Returns the sharded state of the tensors, to save or to load into."""
        return {
            f"{BESIDE}{name}{chunk}": self._shards(model, name)
            for name in self.tensors
            for chunk, model in enumerate(models)
        }

    def _shards(self, model: GPTModel, name: str) -> dict[str, Any]:
        held = self.tensors[name]
        with swapped([model], held):
            found = {own: part for own, part in weights(model).items() if global_name(model, own) in held}
            for part in nested_values(found):
                if isinstance(part, ShardedBase):
                    part.data = part.data.detach()  # else the parameter itself, which has its own values again
        add_prefix_for_sharding(found, f"{BESIDE}{name}.")
        return found

    def load(self, models: Sequence[GPTModel], state: Mapping[str, Any], folder: Path) -> None:
        """Writes the loaded values of `state` into the tensors. Raises CheckpointError if one is missing."""
        for name, held in self.tensors.items():
            found = {
                global_name(model, own): tensor
                for chunk, model in enumerate(models)
                for own, tensor in state.get(f"{BESIDE}{name}{chunk}", {}).items()
            }
            if missing := held.keys() - found.keys():
                raise CheckpointError(f"{folder}: the checkpoint lacks {min(missing)} of {BESIDE}{name}")
            for own, tensor in held.items():
                read = found[own]
                tensor.copy_(read if read.dtype == tensor.dtype else read.view(tensor.dtype))


def has_extra_state(folder: Path) -> bool:
    """True if a checkpoint holds tensors besides the model's. Raises CheckpointError if its index is torn."""
    return any(key.startswith(BESIDE) for key in read_index(folder)[0])
