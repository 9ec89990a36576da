"""``learner.overlap``: communication while layers compute (arXiv:2104.04473, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class OverlapSection(Section):
    """Communication that runs while ranks compute. Results are the same but for the order of sums: that of a norm which
    clips gradients, and of gradients of more than two ranks. How much time it saves is not measured."""

    gradients: bool = False
    """Whether ranks reduce the gradients of a bucket as soon as the last micro-batch's backward pass has computed
    them; false: all together after it. The first step after a start still reduces them then. A bucket ends after 40
    million parameters, or a million for each data-parallel rank if that is more. Only the first chunk of the first
    pipeline stage has several."""
    parameters: bool = False
    """Whether ranks gather the parameters that an optimizer step changed during the next forward pass, a bucket ahead
    of it; false: at the end of the step. A push or a checkpoint right after the step gathers them first."""
    shared_experts: bool = False
    """Whether shared experts compute while tokens are sent to the other experts and back."""


class OverlapKeys(Section):
    """The section of keys of `Overlap`."""

    overlap: OverlapSection = OverlapSection()


class Overlap(Option):
    """Buckets of gradients and parameters, which ranks reduce and gather by themselves."""

    keys = OverlapKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Keys without effect, and what megatron-core's gathering of parameters lacks."""
        section, d = learner.overlap, learner.dims
        if section.gradients and d.dp * d.cp == 1 and d.tp == d.ep * d.etp:
            yield (
                "learner.overlap.gradients=true: each rank has parameters of its own, so there is nothing to reduce; "
                "leave it out, or raise learner.dp"
            )
        yield from _shared_problems(learner, shape)
        if not section.parameters:
            return
        lacking = {
            "learner.overlap.gradients=true": section.gradients,
            "learner.optimizer.name=adamw": learner.optimizer.name == "adamw",
        }
        for key in (key for key, there in lacking.items() if not there):
            yield f"learner.overlap.parameters=true: megatron-core can do this only with {key}; set it"
        if learner.own_layers is not None:
            yield (
                f"learner.overlap.parameters=true with learner.layers={learner.own_layers}: parameters are waited for "
                "when the module that has them is called, and layers of your own may read them otherwise; leave it out"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """What overlaps. Without ``gradients`` there is one bucket, reduced after the pass."""
        section = learner.overlap
        gather = {"overlap_param_gather": True} if section.parameters else {}
        reduce = {"overlap_grad_reduce": True} if section.gradients else {}
        shared = {"moe_shared_expert_overlap": True} if section.shared_experts else {}
        return Keywords(model=shared, ddp={**reduce, **gather}, optimizer=gather)


def _shared_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Nothing to overlap, and what megatron-core's overlap of shared experts lacks."""
    if not learner.overlap.shared_experts:
        return
    d = learner.dims
    if d.ep * d.etp == 1:
        yield (
            "learner.overlap.shared_experts=true with learner.ep=1 and learner.etp=1: no token leaves its rank, so "
            "there is nothing to overlap with; leave it out"
        )
    if shape is not None and not shape.shared_width:
        yield f"learner.overlap.shared_experts=true: model_type={shape.family!r} has no shared experts; leave it out"
    if learner.dispatcher != "alltoall":
        yield (
            f"learner.overlap.shared_experts=true with learner.dispatcher={learner.dispatcher}: megatron-core can do "
            "this only with alltoall; set one of the two"
        )
    if "shared_experts" in learner.recompute.parts:
        yield (
            "learner.overlap.shared_experts=true with learner.recompute.parts=shared_experts: megatron-core cannot "
            "recompute what overlaps; set one of the two"
        )
