"""Tensors that a checkpoint holds beside a model's own, cut as these: megatron's sharded tensors under other names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_megatron.errors import CheckpointError
from rl_megatron.learner.checkpoint.state import Values, weights
from rl_megatron.learner.naming import global_name, global_parameters
from rl_megatron.weights.checkpoints.megatron import BESIDE
from rl_megatron.weights.checkpoints.torch_dist import read_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """For each of some names: tensors under the global names, and in the shapes, of a model's parameters.

    ``values`` gives the tensor with the values of one that holds none now.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Values

    def state(self, models: Sequence[GPTModel]) -> dict[str, Any]:
        """The sharded state of the tensors, to save or to load into."""
        return {
            f"{BESIDE}{name}{chunk}": self._shards(model, name)
            for name in self.tensors
            for chunk, model in enumerate(models)
        }

    def _shards(self, model: GPTModel, name: str) -> dict[str, Any]:
        held = self.tensors[name]
        with _swapped(model, held):
            found = {own: part for own, part in weights(model).items() if global_name(model, own) in held}
            for part in nested_values(found):
                if isinstance(part, ShardedBase):
                    part.data = part.data.detach()  # else the parameter itself, which has its own values again
        add_prefix_for_sharding(found, f"{BESIDE}{name}.")
        return found

    def take(self, models: Sequence[GPTModel], state: Mapping[str, Any], folder: Path) -> None:
        """Write what was loaded into `state` into the tensors. Raises CheckpointError if one is missing."""
        for name, held in self.tensors.items():
            found = {
                global_name(model, own): tensor
                for chunk, model in enumerate(models)
                for own, tensor in state.get(f"{BESIDE}{name}{chunk}", {}).items()
            }
            if missing := held.keys() - found.keys():
                raise CheckpointError(f"{folder}: the checkpoint lacks {min(missing)} of {BESIDE}{name}")
            for own, tensor in held.items():
                tensor.copy_(_as_form(found[own], tensor.dtype))


def holds_beside(folder: Path) -> bool:
    """Whether a checkpoint holds tensors beside the model's. Raises CheckpointError if its index is torn."""
    return any(key.startswith(BESIDE) for key in read_index(folder)[0])


def _as_form(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


@contextlib.contextmanager
def _swapped(model: GPTModel, held: Mapping[str, Tensor]) -> Iterator[None]:
    """Points the parameters to the tensors; integers in the form of the parameter's dtype, which alone it may have."""
    own = [(p, p.data, held[name]) for name, p in global_parameters([model]) if name in held]
    try:
        for parameter, mine, other in own:
            parameter.data = _as_form(other, mine.dtype)
        yield
    finally:
        for parameter, mine, _ in own:
            parameter.data = mine
