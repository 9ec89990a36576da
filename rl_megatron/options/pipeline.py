"""``learner.pp``, ``vpp``, ``stage_layers``: layers on several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

_TERM = r"[1-9]\d{0,3}(\*[1-9]\d{0,3})?"
COUNTS = re.compile(rf"{_TERM}(\+{_TERM})*")
"""Text that `layer_counts` takes."""


def layer_counts(text: str) -> tuple[int, ...]:
    """Numbers of layers: ``7+8*2+6`` is (7, 8, 8, 6)."""
    terms = (term.partition("*") for term in text.split("+"))
    return tuple(int(count) for count, _, times in terms for _ in range(int(times or 1)))


def _checked(text: str) -> str:
    if not COUNTS.fullmatch(text):
        raise PydanticCustomError("stage_layers", "Input should be numbers of layers, as 7+8*2+6")
    return text


def in_flight(pp: int, stage: int, sizes: Sequence[int]) -> float:
    """Of many micro-batches, how many a rank of ``stage`` keeps activations of at once, at most.

    ``sizes`` are the layers of the stage's chunks. Several chunks take turns, each with ``pp`` micro-batches, forward
    from the first chunk and backward from the last, which begins once all chunks have had a turn but the last, and two
    more micro-batches for each later stage. A chunk counts by its share of the stage's layers.
    """
    if len(sizes) == 1:
        return float(pp - stage)
    before, cycle = (len(sizes) - 1) * pp + 2 * (pp - stage - 1) + 1, len(sizes) * pp
    forward = [sizes[n // pp % len(sizes)] for n in range(before + cycle)]
    backward = [sizes[-1 - n // pp] for n in range(cycle)]
    return max(sum(forward[: before + n]) - sum(backward[:n]) for n in range(cycle)) / sum(sizes)


StageLayers = Annotated[str, AfterValidator(_checked)]


class PipelineKeys(Section):
    """The keys of `Pipeline`."""

    pp: Positive = 1
    """Pipeline-parallel degree."""
    vpp: Positive = 1
    """Number of model chunks of each pipeline stage; above 1 is the interleaved schedule."""
    stage_layers: StageLayers | None = None
    """The number of layers of each pipeline stage, as ``7+8*6+6`` for 7, six times 8, and 6; with vpp of each chunk, in
    the order of the model: the first chunks of all stages, then their second chunks, and so on. null: all the same."""

    @property
    def stages(self) -> tuple[int, ...] | None:
        """``stage_layers`` as numbers."""
        return None if self.stage_layers is None else layer_counts(self.stage_layers)


class Pipeline(Option):
    """Runs pipeline stages by the 1F1B schedule, or chunks of stages by its interleaved form (arXiv:2104.04473)."""

    keys = PipelineKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Several chunks without a pipeline, and more or fewer numbers of layers than chunks."""
        given, chunks = learner.stages, learner.pp * learner.vpp
        if given is not None and len(given) != chunks:
            yield (
                f"learner.stage_layers={learner.stage_layers} has {len(given)} numbers, but learner.pp*learner.vpp = "
                f"{learner.pp}*{learner.vpp} = {chunks}; give one for each model chunk"
            )
        elif given is not None and shape is not None and sum(given) != shape.num_layers:
            yield (
                f"learner.stage_layers={learner.stage_layers} has {sum(given)} layers, but the model has "
                f"{shape.num_layers}; give each layer to one chunk"
            )
        if learner.vpp > 1 and learner.pp == 1:
            yield (
                f"learner.vpp={learner.vpp} needs a pipeline, but learner.pp=1; set learner.vpp=1 or learner.pp >= 2"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The degrees, and the layers of each chunk."""
        model: dict[str, object] = {"pipeline_model_parallel_size": learner.pp}
        if learner.stages is not None:
            layers = "|".join("t" * count for count in learner.stages)
            model["pipeline_model_parallel_layout"] = f"E{layers}L"  # embedding, transformer layers, loss
        if learner.vpp > 1:  # batched p2p is silently wrong with vpp at pp=2
            model["virtual_pipeline_model_parallel_size"] = learner.vpp
            model |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        elif learner.pp > 1:  # chunks' outputs are still being sent when megatron frees them
            model["deallocate_pipeline_outputs"] = True
        return Keywords(model=model)

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of activations of all micro-batches in flight; earlier stages have more in flight."""
        chunks = learner.stages or (1,) * (learner.pp * learner.vpp)
        held = in_flight(learner.pp, rank.stage, chunks[rank.stage :: learner.pp])
        return {**terms, "activations": terms["activations"] * held}
