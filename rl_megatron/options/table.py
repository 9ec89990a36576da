"""The table of the learner's options and functions over all of them, with those of features (`rl_megatron.feature`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rl_megatron import feature
from rl_megatron.errors import ConfigError
from rl_megatron.options.batch_invariant import BatchInvariant
from rl_megatron.options.cuda_graphs import CudaGraphs
from rl_megatron.options.deterministic import Deterministic
from rl_megatron.options.device import Device
from rl_megatron.options.dispatcher import Dispatcher
from rl_megatron.options.dtype import Precision
from rl_megatron.options.experts import ExpertParallel
from rl_megatron.options.fp8 import Fp8
from rl_megatron.options.fusion import Fusion
from rl_megatron.options.gradients import Gradients
from rl_megatron.options.head import OutputHead
from rl_megatron.options.layers import Layers
from rl_megatron.options.lora import Lora
from rl_megatron.options.offload import Offload
from rl_megatron.options.optimizer import Optimizer
from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.options.overlap import Overlap
from rl_megatron.options.padding import Padding
from rl_megatron.options.pipeline import Pipeline
from rl_megatron.options.recompute import Recompute
from rl_megatron.options.replicas import Replicas
from rl_megatron.options.routers import Routers
from rl_megatron.options.tensor import TensorParallel

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

OPTIONS: Mapping[str, Option] = {
    "device": Device(),
    "dtype": Precision(),
    "gradients": Gradients(),
    "layers": Layers(),
    "recompute": Recompute(),
    "tensor": TensorParallel(),
    "pipeline": Pipeline(),
    "experts": ExpertParallel(),
    "replicas": Replicas(),
    "padding": Padding(),
    "dispatcher": Dispatcher(),
    "routers": Routers(),
    "fusion": Fusion(),
    "head": OutputHead(),
    "optimizer": Optimizer(),
    "overlap": Overlap(),
    "offload": Offload(),
    "deterministic": Deterministic(),
    "batch_invariant": BatchInvariant(),
    "fp8": Fp8(),
    "cuda_graphs": CudaGraphs(),
    "lora": Lora(),
}
"""This package's options by the name of their file, in the order in which they act on a rank's bytes: what layers keep
of a micro-batch, then how many micro-batches are in flight. Those of features follow."""
_TERMS = ("parameters", "gradients", "optimizer", "activations", "logits", "step")


def options() -> Mapping[str, Option]:
    """All options, by name. Raises ConfigError as `feature.features`; so do the functions below."""
    more = {name: one.option for name, one in feature.features().items() if one.option is not None}
    return {**OPTIONS, **more}


def problems(learner: LearnerSection, shape: ModelShape | None = None) -> Iterator[str]:
    """All options' reasons to refuse; ``shape`` is None before a model is read."""
    for option in options().values():
        yield from option.problems(learner, shape)


def keywords(learner: LearnerSection, shape: ModelShape) -> Keywords:
    """All options' keywords for megatron-core. Raises ConfigError if two options give the same one."""
    found: dict[str, dict[str, object]] = {"model": {}, "ddp": {}, "optimizer": {}}
    owners: dict[tuple[str, str], str] = {}
    for name, option in options().items():
        given = option.megatron(learner, shape)
        for kind, mine in (("model", given.model), ("ddp", given.ddp), ("optimizer", given.optimizer)):
            for keyword, value in mine.items():
                if (owner := owners.setdefault((kind, keyword), name)) != name:
                    raise ConfigError(f"the options {owner!r} and {name!r} both give megatron-core {keyword}; drop one")
                found[kind][keyword] = value
    return Keywords(model=found["model"], ddp=found["ddp"], optimizer=found["optimizer"])


def memory(learner: LearnerSection, shape: ModelShape, rank: Rank) -> Terms:
    """Bytes of a trained model on a rank, of which ``step`` are there only while the optimizer steps.

    Raises ConfigError if an option's `changes` lacks one of its terms.
    """
    terms: Terms = dict.fromkeys(_TERMS, 0.0)
    for name, option in options().items():
        before, terms = terms, option.memory(learner, shape, rank, terms)
        if unsaid := terms.keys() - before.keys() - option.changes.keys():
            raise ConfigError(f"the option {name!r} holds bytes for {min(unsaid)!r}, which its `changes` does not have")
    return terms


def changes() -> Mapping[str, str]:
    """What makes each of the options' own terms smaller, by term."""
    return {term: change for option in options().values() for term, change in option.changes.items()}
