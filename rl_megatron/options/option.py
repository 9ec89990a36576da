"""The base class of the learner's options: keys, refusals, megatron-core's keywords and bytes. One file per option.

Options import neither torch nor megatron-core, so that a login node can check and plan with them.
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
"""Bytes that a rank must hold, by purpose."""
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by dtype."""
VOCAB_MULTIPLE = 8
"""The learner pads the vocabulary's rows to a multiple of this times tp."""


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Vocabulary rows of embedding and output layer: a multiple of ``VOCAB_MULTIPLE * tp``."""
    step = VOCAB_MULTIPLE * tp
    return -(-shape.vocab_size // step) * step


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of torch, by its name in torch."""

    name: str


@dataclass(frozen=True, slots=True)
class Attention:
    """Kernels of attention, by their name in megatron-core's AttnBackend."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keywords:
    """Arguments of megatron-core's constructors: ``model`` of TransformerConfig, ``ddp`` of
    DistributedDataParallelConfig, ``optimizer`` of OptimizerConfig; a dtype is a `Dtype`, attention an `Attention`."""

    model: Mapping[str, object] = field(default_factory=dict)
    ddp: Mapping[str, object] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Parameters of one rank: the optimizer shards ``dense`` ones over dp * cp ranks, ``experts`` over fewer."""

    dense: int
    experts: int

    @property
    def both(self) -> int:
        """Dense and experts' parameters together."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The work of a rank of pipeline stage ``stage``, before any option acts.

    It holds ``parameters``, of which it trains ``trained``, and of these ``matrices`` in matrices of layers. It
    computes ``tokens`` of a micro-batch, in sequences of at most ``longest``, in ``layers``; ``inputs`` has the
    elements of each layer's input, and ``largest`` those of the largest parameter.
    """

    stage: int
    parameters: Elements
    trained: Elements
    matrices: Elements
    tokens: float
    layers: tuple[int, ...]
    inputs: tuple[float, ...]
    longest: float
    largest: int

    def stepped(self, learner: LearnerSection) -> float:
        """How many of ``trained`` this rank steps: the others are its data-parallel peers'."""
        d, held = learner.dims, self.trained
        return held.dense / (d.dp * d.cp) + held.experts * d.etp * d.ep / (d.tp * d.cp * d.dp)


@runtime_checkable
class Option(Protocol):
    """An option of the learner. It overrides the methods that it needs; the defaults here do nothing."""

    keys: ClassVar[type[Section] | None] = None
    """The option's keys, which become keys of the ``learner`` section."""
    changes: ClassVar[Mapping[str, str]] = {}
    """For each of the option's own terms of `memory`: what makes it smaller, for messages."""

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Reasons to refuse the option: what was given, and what to do. ``shape`` is None before a model is read."""
        yield from ()

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The option's keywords for megatron-core; no two options give the same one.

        Raises ConfigError if this machine lacks what the option needs.
        """
        return Keywords()

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """The terms of a trained model with this option's bytes added to ``terms``, those of the options before it."""
        return terms
