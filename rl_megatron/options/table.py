"""The table of the learner's options, of this package and of installed ones, and functions over all of them.

A package brings one by an entry point of the group `GROUP`: ``name = "its.module:OPTION"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import new_class
from typing import TYPE_CHECKING, TypeVar

from rl_megatron.errors import ConfigError
from rl_megatron.options.batch_invariant import BatchInvariant
from rl_megatron.options.cuda_graphs import CudaGraphs
from rl_megatron.options.deterministic import Deterministic
from rl_megatron.options.device import Device
from rl_megatron.options.dispatcher import Dispatcher
from rl_megatron.options.draft import Draft
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
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

S = TypeVar("S", bound=Section)
GROUP = "rl_megatron.options"
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
    "draft": Draft(),
}
"""This package's options by the name of their file, in the order in which they act on a rank's bytes: what layers keep
of a micro-batch, then how many micro-batches are in flight. Installed options follow."""
_TERMS = ("parameters", "gradients", "optimizer", "activations", "logits", "step")


@cache
def installed() -> Mapping[str, Option]:
    """Options of other packages, by name. Raises ConfigError if one cannot be loaded or is not an option."""
    found: dict[str, Option] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        said = f"the option {entry.name!r} that {entry.dist.name if entry.dist else 'a package'} brings ({entry.value})"
        try:
            option = entry.load()
        except Exception as error:  # a package of the user's may raise anything
            raise ConfigError(f"{said} cannot be loaded: {error!r:.500}; fix or uninstall it") from error
        if not isinstance(option, Option):
            raise ConfigError(f"{said} is a {type(option).__name__}; it must have the methods of Option")
        if entry.name in OPTIONS or entry.name in found:
            raise ConfigError(f"{said} has the name of another option; rename it, or uninstall one of them")
        found[entry.name] = option
    return found


def options() -> Mapping[str, Option]:
    """All options, by name. Raises as `installed` does; so do the functions below."""
    return {**OPTIONS, **installed()}


def installed_keys() -> list[str]:
    """Names of the keys that `installed` options bring."""
    return [key for option in installed().values() if option.keys is not None for key in option.keys.model_fields]


def with_installed_keys(section: type[S]) -> type[S]:
    """A decorator that adds the keys of `installed` options after the section's own. Raises ConfigError for a key that
    the section has already."""
    kinds = {name: option.keys for name, option in installed().items() if option.keys is not None}
    seen = set(section.model_fields)
    for name, keys in kinds.items():
        if twice := seen & keys.model_fields.keys():
            raise ConfigError(f"the option {name!r} brings learner.{min(twice)}, which is there already; rename it")
        seen |= keys.model_fields.keys()
    if not kinds:
        return section
    named = {"__module__": section.__module__, "__qualname__": section.__qualname__, "__doc__": section.__doc__}
    made: type[S] = new_class(
        section.__name__, (*reversed(kinds.values()), section), exec_body=lambda names: names.update(named)
    )
    return made


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
