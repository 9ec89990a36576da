"""``learner.recompute``: recomputes activations in the backward pass (arXiv:1604.06174, arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rl_megatron.errors import ConfigError
from rl_megatron.options.implementation import uses_transformer_engine, wants_transformer_engine
from rl_megatron.options.kept import freed, kept, offloaded
from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""megatron-core's ``recompute_modules``."""
_LEAST = 0.01  # of what a layer keeps; a module that frees less costs time for nothing


class RecomputeSection(Section):
    """What the backward pass computes a second time, so that it need not be kept: whole layers, or parts of each layer
    in megatron-core's words. A part that would free nothing is refused."""

    uniform: Positive | None = None
    """Whole layers, so many together, of which only the first one's input is kept; 1 costs a third more computation."""
    moe: bool = False
    """Routers, dispatch and experts, with shared experts."""
    moe_act: bool = False
    """The activation of experts. Torch's layers compute gate and up again too, so that experts keep only their rows."""
    shared_experts: bool = False
    """Shared experts."""
    mlp: bool = False
    """The MLP of dense layers."""
    mla_up_proj: bool = False
    """Queries, keys and values of latent attention, from their latents."""
    core_attn: bool = False
    """Attention without its projections, where torch's layers keep more than its inputs."""
    layernorm: bool = False
    """Norms before experts and latent attention, in TransformerEngine's layers."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The parts, those of `MODULES` that are true."""
        return tuple(module for module in MODULES if getattr(self, module))


class RecomputeKeys(Section):
    """The section of keys of `Recompute`."""

    recompute: RecomputeSection = RecomputeSection()


class Recompute(Option):
    """Recomputes parts of layers, or whole layers."""

    keys = RecomputeKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Keys that exclude each other, parts that would free nothing, and groups that do not divide the layers."""
        section = learner.recompute
        parts = [f"learner.recompute.{module}=true" for module in section.modules]
        if section.uniform is not None and parts:
            given = " ".join([f"learner.recompute.uniform={section.uniform}", *parts])
            yield f"{given}: whole layers leave nothing else to recompute; set one of the two"
        if section.moe and (section.moe_act or section.shared_experts):
            yield f"{' '.join(parts)}: moe recomputes its activation and shared experts too; set moe alone of the three"
        if section.mla_up_proj and learner.own_layers is not None:
            yield (
                f"learner.recompute.mla_up_proj=true with learner.layers={learner.own_layers}: layers of your own "
                "recompute what they choose; leave it out"
            )
        if shape is not None:
            yield from _useless(learner, shape)
            yield from _uneven(learner, shape)

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Granularity, method and number of layers, or modules. Our latent attention recomputes by itself.

        Raises ConfigError for ``layernorm`` without TransformerEngine, of which megatron-core then lacks a name.
        """
        section = learner.recompute
        if section.uniform is not None:
            given = {"recompute_method": "uniform", "recompute_num_layers": section.uniform}
            return Keywords(model={"recompute_granularity": "full", **given})
        modules, model = list(section.modules), dict[str, object]()
        fused = uses_transformer_engine(learner, shape)
        if section.layernorm and not fused:
            raise ConfigError("learner.recompute.layernorm=true: TransformerEngine is not installed here; leave it out")
        if section.mla_up_proj and not fused:
            modules.remove("mla_up_proj")
            model["recompute_up_projections"] = True
        if modules:
            model |= {"recompute_granularity": "selective", "recompute_modules": modules}
        return Keywords(model=model)

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of one micro-batch's activations that stay on the GPU while others are computed."""
        return {**terms, "activations": sum(_chunk(learner, shape, rank, chunk) for chunk in _chunks(rank))}


def _chunk(learner: LearnerSection, shape: ModelShape, rank: Rank, layers: list[int]) -> float:
    """Bytes that the consecutive ``layers`` of a pipeline chunk keep."""
    section, whole = learner.recompute, rank.tokens * shape.hidden_size * BYTES[learner.dtype] / learner.tp
    if section.uniform is not None:
        return whole * -(-len(layers) // section.uniform)
    left = 0.0
    for layer in layers:
        frees = freed(learner, shape, layer, rank.longest)
        left += kept(learner, shape, layer, rank.longest) - sum(frees.get(module, 0.0) for module in section.modules)
        left -= sum(offloaded(learner, shape, layer, rank.longest))
    received = whole if layers[0] and learner.offload.activations.attention else 0.0  # the schedule keeps that
    return received + rank.tokens * left


def _chunks(rank: Rank) -> Iterator[list[int]]:
    """The rank's layers by pipeline chunk: no two chunks of a rank follow one another."""
    for _, chunk in groupby(enumerate(rank.layers), lambda at: at[1] - at[0]):
        yield [layer for _, layer in chunk]


def _useless(learner: LearnerSection, shape: ModelShape) -> Iterator[str]:
    """Parts that free less than `_LEAST` of every layer, with the reason."""
    fused = wants_transformer_engine(learner, shape)
    of_norms = "its norms are parts of linears" if fused else "megatron-core needs TransformerEngine's layers for it"
    reasons = {
        "core_attn": "attention keeps no more than its inputs",
        "layernorm": of_norms,
        "mla_up_proj": "the model has no latent attention",
        "mlp": "the model has no dense layers",
        "moe": "the model has no experts",
        "moe_act": "the model has no experts",
        "shared_experts": "the model has no shared experts",
    }
    layers, longest = range(shape.num_layers), learner.max_tokens_per_micro_batch
    for module in learner.recompute.modules:
        shares = (freed(learner, shape, n, longest).get(module, 0.0) / kept(learner, shape, n, longest) for n in layers)
        if all(share < _LEAST for share in shares):
            yield f"learner.recompute.{module}=true would free nothing: {reasons[module]}; leave it out"


def _uneven(learner: LearnerSection, shape: ModelShape) -> Iterator[str]:
    """Groups of layers that do not divide those of a pipeline chunk; megatron-core then asks for layers beyond."""
    section = learner.recompute
    sizes = sorted(set(learner.stages or [shape.num_layers // (learner.pp * learner.vpp)]))
    if section.uniform is not None and (odd := [size for size in sizes if size % section.uniform]):
        yield (
            f"learner.recompute.uniform={section.uniform} does not divide the {odd[0]} layers of a pipeline chunk; "
            "set it to 1, or to a number that divides them"
        )
