"""``learner.recompute``: recomputes activations in the backward pass (arXiv:1604.06174, arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.options.implementation import uses_transformer_engine, wants_transformer_engine
from rl_megatron.options.kept import freed, kept, offloaded
from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.rules import as_given
from rl_megatron.section import LISTED, SORTED, Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

Part = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""Of megatron-core's ``recompute_modules``."""
_LEAST = 0.01  # of what a layer keeps; a module that frees less costs time for nothing


class RecomputeSection(Section):
    """What the backward pass computes a second time, so that it need not be kept: whole layers, or parts of each."""

    uniform: Positive | None = None
    """Whole layers, so many together, of which only the first one's input is kept; 1 costs a third more computation."""
    parts: Annotated[tuple[Part, ...], LISTED, SORTED] = ()
    """Parts of each layer in megatron-core's words; one that would free nothing is refused. moe: routers, dispatch and
    experts, with shared experts; moe_act: the activation of experts, with torch's layers gate and up, too, so that
    experts keep only their rows; shared_experts; mlp: of dense layers; mla_up_proj: queries, keys and values of latent
    attention, from their latents; core_attn: attention without its projections, where torch's layers keep more than its
    inputs; layernorm: norms before experts and latent attention, in TransformerEngine's layers."""


class RecomputeKeys(Section):
    """The section of keys of `Recompute`."""

    recompute: RecomputeSection = RecomputeSection()


class Recompute(Option):
    """Recomputes parts of layers, or whole layers."""

    keys = RecomputeKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Keys that exclude each other, parts that would free nothing, and groups that do not divide the layers."""
        section = learner.recompute
        given = f"learner.recompute.parts={as_given(section.parts)}"
        if section.uniform is not None and section.parts:
            both = f"learner.recompute.uniform={section.uniform} {given}"
            yield f"{both}: whole layers leave nothing else to recompute; set one of the two"
        if "moe" in section.parts and {"moe_act", "shared_experts"} & {*section.parts}:
            yield f"{given}: moe recomputes its activation and shared experts too; name moe alone of the three"
        if "mla_up_proj" in section.parts and learner.own_layers is not None:
            yield (
                f"learner.recompute.parts=mla_up_proj with learner.layers={learner.own_layers}: layers of your own "
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
        modules, model = list[str](section.parts), dict[str, object]()
        fused = uses_transformer_engine(learner, shape)
        if "layernorm" in modules and not fused:
            raise ConfigError(
                "learner.recompute.parts=layernorm: TransformerEngine is not installed here; leave it out"
            )
        if "mla_up_proj" in modules and not fused:
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
        left += kept(learner, shape, layer, rank.longest) - sum(frees.get(module, 0.0) for module in section.parts)
        left -= sum(offloaded(learner, shape, layer, rank.longest))
    received = whole if layers[0] and "attention" in learner.offload.activations else 0.0  # the schedule keeps that
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
    for module in learner.recompute.parts:
        shares = (freed(learner, shape, n, longest).get(module, 0.0) / kept(learner, shape, n, longest) for n in layers)
        if all(share < _LEAST for share in shares):
            yield f"learner.recompute.parts={module} would free nothing: {reasons[module]}; leave it out"


def _uneven(learner: LearnerSection, shape: ModelShape) -> Iterator[str]:
    """Groups of layers that do not divide those of a pipeline chunk; megatron-core then asks for layers beyond."""
    section = learner.recompute
    sizes = sorted(set(learner.stages or [shape.num_layers // (learner.pp * learner.vpp)]))
    if section.uniform is not None and (odd := [size for size in sizes if size % section.uniform]):
        yield (
            f"learner.recompute.uniform={section.uniform} does not divide the {odd[0]} layers of a pipeline chunk; "
            "set it to 1, or to a number that divides them"
        )
