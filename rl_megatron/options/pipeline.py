"""``learner.pp``, ``vpp``, ``first_stage_layers``, ``last_stage_layers``: layers on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class PipelineKeys(Section):
    """The keys of `Pipeline`."""

    pp: Positive = 1
    """Pipeline-parallel degree."""
    vpp: Positive = 1
    """Number of model chunks of each pipeline stage; above 1 is the interleaved schedule."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: as many as each of the middle stages, which share the rest equally."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; null: as many as each of the middle stages."""


class Pipeline(Option):
    """Runs pipeline stages by the 1F1B schedule, or chunks of stages by its interleaved form (arXiv:2104.04473)."""

    keys = PipelineKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Several chunks without a pipeline."""
        if learner.vpp > 1 and learner.pp == 1:
            yield (
                f"learner.vpp={learner.vpp} needs a pipeline, but learner.pp=1; set learner.vpp=1 or learner.pp >= 2"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The degrees, and the sizes of uneven stages."""
        model: dict[str, object] = {
            "pipeline_model_parallel_size": learner.pp,
            "num_layers_in_first_pipeline_stage": learner.first_stage_layers,
            "num_layers_in_last_pipeline_stage": learner.last_stage_layers,
        }
        if learner.vpp > 1:  # batched p2p is silently wrong with vpp at pp=2
            model["virtual_pipeline_model_parallel_size"] = learner.vpp
            model |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        return Keywords(model=model)

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of activations of all micro-batches in flight; earlier stages have more in flight."""
        pp, vpp = learner.pp, learner.vpp
        in_flight = float(pp - rank.stage)
        if vpp > 1:  # counted in chunks
            in_flight = min(2 * (pp - rank.stage - 1) + (vpp - 1) * pp + 1, pp * vpp) / vpp
        return {**terms, "activations": terms["activations"] * in_flight}
