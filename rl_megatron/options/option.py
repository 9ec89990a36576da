"""The base class of the learner's options: keys, refusals, megatron-core's keywords and bytes. One file per option.

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

Terms = Mapping[str, float]
"""Bytes that a rank must hold, by what for."""
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
"""Of an element, by dtype."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Parameters of one rank: ``dense`` ones are shared out over dp and cp by the optimizer, ``experts`` over less."""

    dense: int
    experts: int

    @property
    def both(self) -> int:
        """All of them."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a rank of pipeline stage ``stage`` has to do, before any option acts.

    ``tokens`` of a micro-batch are on it, and ``inputs`` and ``kept`` are elements of such a micro-batch, an entry for
    each of the rank's layers: what enters the layer, and all that it keeps for its backward pass.
    """

    stage: int
    parameters: Elements
    tokens: float
    inputs: tuple[float, ...]
    kept: tuple[float, ...]


@runtime_checkable
class Option(Protocol):
    """An option of the learner. Whatever it has nothing to say to stays as it is here."""

    keys: ClassVar[type[Section] | None] = None
    """Its keys, which the ``learner`` section has among its own."""
    changes: ClassVar[Mapping[str, str]] = {}
    """Where it has terms of its own: what makes each of them smaller."""

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Why it is refused, each with what was given and what to do. ``shape`` is None before a model is read."""
        yield from ()

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """What megatron-core is given for it; no other option gives the same keyword.

        Raises ConfigError where this machine lacks what it needs.
        """
        return Keywords()

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """The terms of a model that is trained, with its bytes: ``terms`` are those of the options before it."""
        return terms
