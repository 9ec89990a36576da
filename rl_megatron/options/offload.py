"""``learner.offload``: state that waits in the host's memory, always or while servers sample on the same GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.options.kept import offloaded
from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.section import LISTED, SORTED, Fraction, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


SLAB = 2**30
"""Bytes of the host that are pinned at once for what leaves a GPU while servers sample."""
HELD = 2
"""Halves of layers whose copies may run on behind the half that computes: their memory of the GPU is not free yet."""
_MOMENTS = 8 / 12  # of the state's bytes
_INSIDE = {
    "attention": ("core_attn", "mla_up_proj", "layernorm"),
    "mlp": ("mlp", "layernorm"),
    "moe": ("moe", "moe_act", "shared_experts", "layernorm"),
}
"""Parts that ``learner.recompute`` may compute again, by the half that they are in."""


class OffloadSection(Section):
    """What a rank keeps in the host's memory, not in its GPU's."""

    activations: Annotated[tuple[Literal["attention", "mlp", "moe"], ...], LISTED, SORTED] = ()
    """Halves of decoder layers, with their norms, whose activations wait in the host's pinned memory for the backward
    pass: attention; the mlp of dense layers; moe, so routers, dispatch and all experts. Copies leave while the next
    half computes, and come back while the backward pass computes the one after it. Results keep their bits. A GPU then
    holds two halves of one micro-batch, but the host all of those in flight. Copies hide behind computing where
    sequences are long, or matrices wide: how far is not measured. Tensors of less than 1 MiB stay."""
    optimizer: Fraction = 0.0
    """Share of the optimizer's moments, rounded up to whole parameters. Those parameters are stepped on the CPU, which
    takes longer, and take 16 bytes each of the host's memory, or more: weight, moments and gradient in float32, of
    which weight and gradient are pinned in powers of two."""
    while_sampling: Literal["gradients", "optimizer"] | None = None
    """What leaves the GPU before servers that take turns with the learner (``rollout.server.colocated``) wake, until it
    is needed again: the memory of gradients and of weights' copies in float8, which costs nothing; or that, the
    optimizer's state, and the weights of a critic and a reference, which wait in as much pinned memory of the host."""


def leaving(learner: LearnerSection) -> frozenset[str]:
    """What leaves a GPU while servers sample: "gradients", without a copy, as do weights' copies in float8; and with a
    copy in the host's memory "optimizer", and "models", those whose weights are not pushed."""
    kinds = {"gradients": ("gradients",), "optimizer": ("gradients", "optimizer", "models")}
    return frozenset(kinds[learner.offload.while_sampling] if learner.offload.while_sampling else ())


class OffloadKeys(Section):
    """The section of keys of `Offload`."""

    offload: OffloadSection = OffloadSection()


class Offload(Option):
    """Steps a share of the parameters on the CPU (megatron-core's HybridDeviceOptimizer), and moves activations."""

    keys = OffloadKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """CPU ranks, whose state is in the host's memory already, and state that is not shared out."""
        share = learner.offload.optimizer
        if share and learner.device == "cpu":
            yield f"learner.offload.optimizer={share:g} with learner.device=cpu would have no effect; leave it out"
        if (level := learner.offload.while_sampling) and learner.device == "cpu":
            yield (
                f"learner.offload.while_sampling={level} with learner.device=cpu would have no effect: there is no GPU "
                "to leave; leave it out"
            )
        lacking = {
            "learner.optimizer.name=adamw": learner.optimizer.name == "adamw",
            "learner.dtype=bfloat16": learner.dtype == "bfloat16",
        }
        for key in (key for key, there in lacking.items() if share and not there):
            yield f"learner.offload.optimizer={share:g}: megatron-core can do this only with {key}; set it"
        yield from _activation_problems(learner, shape)

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The share, and copies that overlap with the step.

        Raises ConfigError where TransformerEngine or apex is installed: their Adam counts steps for all parameters,
        which an offloaded optimizer does not get back on a resume.
        """
        if not learner.offload.optimizer:
            return Keywords()
        for package in ("transformer_engine", "apex"):
            if importlib.util.find_spec(package) is not None:
                raise ConfigError(
                    f"learner.offload.optimizer={learner.offload.optimizer:g}: {package} is installed, with whose Adam "
                    "megatron-core 0.16.1 cannot resume an offloaded optimizer; set it to 0, or uninstall the package"
                )
        return Keywords(
            optimizer={
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": learner.offload.optimizer,
                "overlap_cpu_optimizer_d2h_h2d": True,
            }
        )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of the optimizer's state that stay: float32 weights, which ranks exchange, stay too. And activations
        on their way: the most that `HELD` halves have."""
        layers = [offloaded(learner, shape, layer, rank.longest) for layer in rank.layers]
        held = max((sum(halves) / len(halves) for halves in layers if halves), default=0.0) * HELD * rank.tokens
        optimizer = terms["optimizer"] * (1 - _MOMENTS * learner.offload.optimizer)
        return {**terms, "optimizer": optimizer, "activations": terms["activations"] + held}


def _activation_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """CPU ranks, halves that no layer has or that are recomputed, and tensors that other streams compute."""
    parts = learner.offload.activations
    given = [f"learner.offload.activations={part}" for part in parts]
    if not parts:
        return
    if learner.device == "cpu":
        yield f"{given[0]} with learner.device=cpu would have no effect: there is no GPU to leave; leave it out"
    if (count := learner.recompute.uniform) is not None:
        yield (
            f"{given[0]} with learner.recompute.uniform={count}: layers that are computed again keep their inputs "
            "alone; set one of the two"
        )
    for part, said in zip(parts, given, strict=True):
        for module in learner.recompute.parts:
            if module in _INSIDE[part]:
                yield (
                    f"{said} with learner.recompute.parts={module}: what is computed again is a part of what would be "
                    "moved; set one of the two"
                )
    if learner.fp8 is not None:
        yield (
            f"{given[0]} with learner.fp8={learner.fp8}: layers keep copies of weights in float8 among activations, "
            "which would be moved too; set one of the two"
        )
    if learner.cuda_graphs:
        yield (
            f"{given[0]} with learner.cuda_graphs=true: graphs keep activations in memory of their own, from which "
            "nothing can leave; set one of the two"
        )
    if learner.own_layers is not None:
        yield (
            f"{given[0]} with learner.layers={learner.own_layers}: what layers of your own keep is not known; leave it "
            "out"
        )
    streams = {
        "learner.overlap.shared_experts=true": learner.overlap.shared_experts,
        f"learner.dispatcher={learner.dispatcher}": learner.dispatcher != "alltoall",
    }
    for key in (key for key, there in streams.items() if there and "moe" in parts):
        yield (
            f"learner.offload.activations=moe with {key}: tensors of other streams than the layers' would be "
            "moved, for which nothing waits; set one of the two"
        )
    if shape is not None:
        layers = {"attention": shape.num_layers, "moe": len(shape.moe_layers)}
        layers["mlp"] = shape.num_layers - layers["moe"]
        for part in (part for part in parts if not layers[part]):
            has = {"mlp": "dense layers", "moe": "experts"}[part]
            yield f"learner.offload.activations={part}: the model has no {has}; leave it out"
