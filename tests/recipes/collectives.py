"""Bytes of the collectives of a learner rank's step by kind, in closed form, beside which a dry run counts. No torch.

Bytes of a collective are those of its larger side, as `Meter` counts them; a token's are in `scaling.layers.messages`,
from which `scaling.time` has its seconds. Experts' tokens and their probabilities are sent and combined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import BYTES
from rl_megatron.weights.layouts.learner import Terms
from tools.planner.layers import (
    COUNT,
    LOGPROBS,
    PROBABILITY,
    backward_columns,
    forward_columns,
    head_gathers,
    replicated,
)


def uncounted(learner: LearnerSection, shape: ModelShape) -> str:
    """The key whose collectives the closed form does not have; empty if it has all."""
    d, section = learner.dims, learner.recompute
    unknown = {
        f"learner.cp={d.cp}": d.cp > 1,
        f"learner.etp={d.etp}": d.etp > 1 and bool(shape.num_experts),
        f"learner.optimizer.name={learner.optimizer.name}": learner.optimizer.name != "adamw",
        "learner.recompute": bool(set(section.parts) - {"moe_act", "core_attn", "layernorm"}),
        "tied embeddings of several stages": shape.tie_embeddings and d.pp > 1,
    }
    return next((key for key, found in unknown.items() if found), "")


def collectives(
    learner: LearnerSection, shape: ModelShape, stage: int, held: Terms, *, layers: Sequence[int], micro_batches: int
) -> Mapping[str, float]:
    """Bytes by kind of a rank of ``stage`` with ``layers`` in a step of full micro-batches. ``held`` are its bytes of
    parameters and gradients, as of `tools.planner.memory.footprints`."""
    d, size, tokens = learner.dims, BYTES[learner.dtype], learner.max_tokens_per_micro_batch
    whole = tokens * shape.hidden_size * size
    sparse = len([n for n in layers if n in shape.moe_layers])
    again = 1 if learner.recompute.uniform is not None else 0
    first, last = stage == 0, stage == d.pp - 1
    out: dict[str, float] = defaultdict(float)
    if d.tp > 1:
        for kind, count in ((False, len(layers) - sparse), (True, sparse)):
            forward, backward = forward_columns(shape, sparse=kind), backward_columns(shape, sparse=kind)
            times = tokens * size * count
            out["all-gather"] += times * (forward.gathered * (1 + again) + backward.gathered)
            out["reduce-scatter"] += times * (forward.scattered * (1 + again) + backward.scattered)
        out["all-gather"] += whole * (first + head_gathers(float32=learner.head_dtype is not None) * last)
        out["reduce-scatter"] += whole * (first + last)
    if d.ep > 1 and sparse:
        rows = tokens / d.tp * shape.experts_per_token
        out["all-to-all"] += sparse * rows * (shape.hidden_size * size * 2 * (2 + again) + PROBABILITY * (2 + again))
        out["all-gather"] += sparse * (1 + again) * d.ep * shape.num_experts * COUNT
    if d.pp > 1:  # each way over each side of each chunk
        out["send"] = out["receive"] = whole / d.tp * (2 * d.vpp - first - last)
    if last and d.tp > 1:
        out["all-reduce"] += tokens * 4 * LOGPROBS
    out = defaultdict(float, {kind: moved * micro_batches for kind, moved in out.items()})
    out["reduce-scatter"] += held["gradients"]
    out["all-gather"] += held["parameters"]
    if d.tp > 1:
        kept = held["gradients"] / held["parameters"] * size  # of one parameter's gradient
        out["all-reduce"] += kept * replicated(shape, len(layers), sparse, last=last)
    return {kind: moved for kind, moved in out.items() if moved}


def layers_of(learner: LearnerSection, shape: ModelShape, stage: int) -> list[int]:
    """The layers of a stage, in all its chunks."""
    d = learner.dims
    counts = learner.stages or (shape.num_layers // (d.pp * d.vpp),) * (d.pp * d.vpp)
    ends = list(accumulate(counts))
    return [n for chunk in range(stage, len(counts), d.pp) for n in range(ends[chunk] - counts[chunk], ends[chunk])]
