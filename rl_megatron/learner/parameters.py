"""A rank's parameters: global names as weights/ has them (``decoder.layers.{layer}…weight{expert}``), and settings of
their groups in an optimizer: which decay, and that a resumed run keeps its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rl_megatron.feature import ChunkAdapters

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_DRAFT = "mtp.layers.0."
_HELD = (".router.expert_bias", ".indexer.")  # parts of the names of buffers that layouts have
_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|\w+_[AB]))(\d+)$")  # adapters: x_A, x_B
_OF_THE_RUN = {"params", "step"}  # all else in a group is a setting


def global_name(chunk: Any, name: str) -> str:
    """Returns the global name of the parameter that a chunk of the policy, or its draft layer, calls ``name``."""
    if name.startswith(_DRAFT):
        name = f"mtp.layers.{chunk.config.num_layers}.{name.removeprefix(_DRAFT)}"
    if found := _LAYER.match(name):
        layer = chunk.decoder.layers[int(found[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{name[found.end() :]}"
    if found := _EXPERT.search(name):
        local_experts = (chunk.config.num_moe_experts or 0) // chunk.config.expert_model_parallel_size
        first_expert = parallel_state.get_expert_model_parallel_rank() * local_experts
        name = f"{name[: found.start()]}{found[1]}{int(found[2]) + first_expert}"
    return name


def chunk_adapters(model: MegatronModule) -> ChunkAdapters | None:
    """Returns the parameters that a feature has added to a chunk of the model."""
    found: ChunkAdapters | None = getattr(model, "adapters", None)
    return found


def is_adapter(model: MegatronModule, name: str) -> bool:
    """True if the parameter that a chunk of the model calls ``name`` is one of its `ChunkAdapters`."""
    found = chunk_adapters(model)
    return found is not None and found.mark in name


def global_parameters(chunks: Sequence[MegatronModule]) -> Iterator[tuple[str, Tensor]]:
    """(global name, tensor) of every parameter on this rank, and of the buffers of its routers and indexers."""
    for chunk in chunks:
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if any(part in name for part in _HELD))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            yield global_name(chunk, name), parameter


@contextlib.contextmanager
def swapped(chunks: Sequence[MegatronModule], held: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which parameters point to the tensors of their global names, if there are any, without a copy. Tensors
    of another dtype are viewed in the parameter's, the only one it may have."""
    own = [(p, p.data, held[name]) for name, p in global_parameters(chunks) if name in held]
    try:
        for parameter, mine, other in own:
            parameter.data = other if other.dtype == mine.dtype else other.view(mine.dtype)
        yield
    finally:
        for parameter, mine, _ in own:
            parameter.data = mine


def overrides(config: OptimizerConfig) -> dict[ParamKey, Any]:
    """Megatron's: no decay of biases and of one-dimensional parameters. All experts' biases may be one tensor."""
    found: dict[ParamKey, Any] = get_standard_config_overrides(config)
    return {**found, ParamKey(name="*_bias"): {"wd_mult": 0.0}}


def group_by_decay(
    config: OptimizerConfig, chunks: Sequence[Any], parameters: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """Groups of ``parameters`` of ``chunks``: those that decay, and those that do not. At least one, maybe empty."""
    still = {
        id(parameter)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if any("wd_mult" in said and key.matches(parameter, name) for key, said in overrides(config).items())
    }
    groups = [
        {"params": [p for p in parameters if id(p) not in still], "wd_mult": 1.0},
        {"params": [p for p in parameters if id(p) in still], "wd_mult": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def set_decay(optimizer: MegatronOptimizer, weight_decay: float) -> None:
    """Gives each group its decay, as megatron's scheduler of learning rates does: the learner has no such scheduler."""
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


@contextlib.contextmanager
def keep_group_settings(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Context in which loads change the count of steps of groups alone. Their settings stay those that the run was
    given, and not those of the run that saved a checkpoint, or of its kind of AdamW."""
    own = [{key: value for key, value in group.items() if key not in _OF_THE_RUN} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        for key in group.keys() - settings.keys() - _OF_THE_RUN:
            del group[key]
        group.update(settings)


def add_missing(saved: list[dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Adds those of ``groups`` that a saved list of an older version lacks, with the count of steps of the others."""
    there = {_identity(group) for group in saved}
    for group in groups:
        if _identity(group) not in there:
            saved.append({**saved[0], **{key: group[key] for key in param_group_identifier_keys if key in group}})


def _identity(group: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys)
