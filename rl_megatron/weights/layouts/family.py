"""A model family: the reader of its config.json, and its rows in each layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import DecoderNames, ExpertNames, ModelShape
from rl_megatron.weights.layouts.layout import ParamSpec

Reader = Callable[[dict[str, Any], Path], ModelShape]
"""Reads sizes from the keys of config.json, whose path is for errors. Raises ConfigError that names the file, the key,
its value and what is allowed, for each setting that the family's rows do not cover."""


_STACK = ".experts.gate_up_proj"  # is in the name of a tensor of all experts


def as_held(shape: ModelShape, names: Collection[str]) -> ModelShape:
    """``shape`` with experts of one tensor a layer or one by one, as tensors of these names are; of either layout."""
    stacks = [name.startswith("mtp.") for name in names if _STACK in name]  # whether it is a draft layer's
    return replace(
        shape,
        stacked_experts=shape.stacked_experts or not all(stacks),
        stacked_drafts=shape.stacked_drafts or any(stacks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything about a family. It is defined beside the rows, because models import no weights.

    ``model_types`` are the ``model_type``s of config.json that ``read`` takes. ``tables`` has rows for ``hf``,
    ``megatron`` and, if plans support engines with it, ``engine``; ``stacked`` has them for files with one tensor
    for all experts of a layer, as `as_held` finds them, if there are any. ``serves``: the in-process engine
    ``rollout.local`` can sample from it, because the parts of its layers are among those of `ReferenceModel`, under the
    same names but for experts', which are ``names``, and what ``decoder`` says. Raises ConfigError if a table is
    missing.
    """

    model_types: tuple[str, ...]
    read: Reader
    tables: Mapping[str, Sequence[ParamSpec]]
    stacked: Mapping[str, Sequence[ParamSpec]] | None = None
    serves: bool = False
    names: ExpertNames = field(default_factory=ExpertNames)
    decoder: DecoderNames = field(default_factory=DecoderNames)

    def __post_init__(self) -> None:
        missing = {"hf", "megatron"} - self.tables.keys()
        if missing:
            raise ConfigError(
                f"the family of model_type {', '.join(map(repr, self.model_types))} has no table for "
                f"{' and '.join(sorted(missing))}; give tables for hf and megatron, and for engine if plans support one"
            )
