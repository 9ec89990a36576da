"""The options of the learner, and all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rl_megatron.errors import ConfigError
from rl_megatron.options.balance import Balance
from rl_megatron.options.device import Device
from rl_megatron.options.dispatcher import Dispatcher
from rl_megatron.options.dtype import Precision
from rl_megatron.options.experts import ExpertParallel
from rl_megatron.options.head import OutputHead
from rl_megatron.options.layers import Layers
from rl_megatron.options.optimizer import Optimizer
from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.options.pipeline import Pipeline
from rl_megatron.options.recompute import Recompute
from rl_megatron.options.replicas import Replicas
from rl_megatron.options.tensor import TensorParallel

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

OPTIONS: Mapping[str, Option] = {
    "device": Device(),
    "dtype": Precision(),
    "layers": Layers(),
    "recompute": Recompute(),
    "tensor": TensorParallel(),
    "pipeline": Pipeline(),
    "experts": ExpertParallel(),
    "replicas": Replicas(),
    "dispatcher": Dispatcher(),
    "balance": Balance(),
    "head": OutputHead(),
    "optimizer": Optimizer(),
}
"""By the name of their file, in the order in which they act on a rank's bytes: what layers keep of a micro-batch
before how many are in flight."""
_TERMS = ("parameters", "gradients", "optimizer", "activations", "logits")


def options() -> Mapping[str, Option]:
    """All of them, by name."""
    return OPTIONS


def problems(learner: LearnerSection, shape: ModelShape | None = None) -> Iterator[str]:
    """Why options refuse; ``shape`` is None before a model is read."""
    for option in options().values():
        yield from option.problems(learner, shape)


def keywords(learner: LearnerSection, shape: ModelShape) -> Keywords:
    """What megatron-core is given for all options. Raises ConfigError where two give the same keyword."""
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
    """Bytes of a trained model on a rank. Raises ConfigError where an option does not say what makes a term smaller."""
    terms: Terms = dict.fromkeys(_TERMS, 0.0)
    for name, option in options().items():
        before, terms = terms, option.memory(learner, shape, rank, terms)
        if unsaid := terms.keys() - before.keys() - option.changes.keys():
            raise ConfigError(f"the option {name!r} holds bytes for {min(unsaid)!r}, which its `changes` does not have")
    return terms


def changes() -> Mapping[str, str]:
    """Of terms that options bring beside the usual: what makes each of them smaller."""
    return {term: change for option in options().values() for term, change in option.changes.items()}
