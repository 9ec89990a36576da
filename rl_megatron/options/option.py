"""What an option of the learner is: keys, refusals and megatron-core's keywords. One file an option.

Options import neither torch nor megatron-core: a login node checks and plans by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of torch, by its name there."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keywords:
    """Arguments of megatron-core's constructors: ``model`` of TransformerConfig, ``ddp`` of
    DistributedDataParallelConfig, ``optimizer`` of OptimizerConfig; a dtype is a `Dtype`."""

    model: Mapping[str, object] = field(default_factory=dict)
    ddp: Mapping[str, object] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class Option(Protocol):
    """An option of the learner. Whatever it has nothing to say to stays as it is here."""

    keys: ClassVar[type[Section] | None] = None
    """Its keys, which the ``learner`` section has among its own."""

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Why it is refused, each with what was given and what to do. ``shape`` is None before a model is read."""
        yield from ()

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """What megatron-core is given for it; no other option gives the same keyword.

        Raises ConfigError where this machine lacks what it needs.
        """
        return Keywords()
