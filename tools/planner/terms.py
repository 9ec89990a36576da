"""Bytes of a trained model on one rank of the learner, by purpose, if the GPU holds nothing else. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rl_megatron import feature
from rl_megatron.config.activations import activation_bytes, freed, offloaded, wants_transformer_engine
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner.keywords import HELD, LOGITS_TOKENS, STEPPED_AT_ONCE, WEIGHT_ROWS
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import BYTES
from rl_megatron.weights.layouts.layout import padded_vocab
from rl_megatron.weights.layouts.learner import Rank, Terms

_COPIES = 2  # bytes of a weight's copies in float8: one for each direction in which it is multiplied
_MOMENT = 4  # bytes
_MOMENTS = 8 / 12  # share of the optimizer's bytes
_CHANGES: Mapping[str, str] = {
    "fp8 weights": "raise learner.tp, learner.pp or learner.ep",
}


def changes() -> Mapping[str, str]:
    """Returns, by term, the changes that shrink terms that only some keys have, with those of features."""
    return {**_CHANGES, **{term: say for one in feature.features().values() for term, say in one.changes.items()}}


def memory(learner: LearnerSection, shape: ModelShape, rank: Rank) -> Terms:
    """Returns bytes of a trained model on a rank; those of ``step`` exist only while the optimizer steps.

    Raises ConfigError if a feature's `changes` lacks one of its terms.
    """
    optimizer, step = optimizer_bytes(learner, shape, rank)
    chunks = learner.stages or (1,) * (learner.pp * learner.vpp)
    held = num_in_flight(learner.pp, rank.stage, chunks[rank.stage :: learner.pp])
    halves = [offloaded(learner, shape, layer, rank.longest) for layer in rank.layers]
    leaving = max((sum(some) / len(some) for some in halves if some), default=0.0) * HELD * rank.tokens
    terms: Terms = {
        "parameters": float(rank.parameters.both * BYTES[learner.dtype]),
        "gradients": float(rank.trained_parameters.both * BYTES[learner.gradient_dtype]),
        "optimizer": optimizer * (1 - _MOMENTS * learner.offload.optimizer),  # float32 weights stay to be exchanged
        "activations": kept_bytes(learner, shape, rank) * held + leaving,
        "logits": logits_bytes(learner, shape, rank),
        "step": step,
    }
    if learner.fp8 is not None:  # they stay between passes, but for learner.offload.while_sampling
        last = rank.stage == learner.pp - 1
        tables = (rank.stage == 0) + last - (shape.tie_embeddings and rank.stage == 0 and last)
        products = rank.parameters.both - tables * shape.vocab_size * shape.hidden_size / learner.tp
        terms = {**terms, "fp8 weights": _COPIES * products}
    for name, one in feature.features().items():
        before, terms = terms, one.memory(learner, shape, rank, terms)
        if unsaid := terms.keys() - before.keys() - one.changes.keys():
            raise ConfigError(f"the feature {name!r} holds bytes for {min(unsaid)!r}, which its `changes` do not have")
    return terms


def num_in_flight(pp: int, stage: int, sizes: Sequence[int]) -> float:
    """Returns the most micro-batches for which a rank of ``stage`` keeps activations, out of many.

    ``sizes`` are the layers of the stage's chunks. Several chunks take turns, each with ``pp`` micro-batches, forward
    from the first chunk and backward from the last. Backward begins after a turn of all chunks but the last, and two
    more micro-batches for each later stage. A chunk counts by its share of the stage's layers.
    """
    if len(sizes) == 1:
        return float(pp - stage)
    before, cycle = (len(sizes) - 1) * pp + 2 * (pp - stage - 1) + 1, len(sizes) * pp
    forward = [sizes[n // pp % len(sizes)] for n in range(before + cycle)]
    backward = [sizes[-1 - n // pp] for n in range(cycle)]
    return max(sum(forward[: before + n]) - sum(backward[:n]) for n in range(cycle)) / sum(sizes)


def kept_bytes(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Returns bytes of one micro-batch's activations that stay on the GPU while others are computed."""
    section, whole, out = learner.recompute, rank.tokens * shape.hidden_size * BYTES[learner.dtype] / learner.tp, 0.0
    for _, chunk in groupby(enumerate(rank.layers), lambda at: at[1] - at[0]):  # no chunk of a rank follows another
        layers = [layer for _, layer in chunk]
        if section.uniform is not None:
            out += whole * -(-len(layers) // section.uniform)
            continue
        left = 0.0
        for layer in layers:
            frees = freed(learner, shape, layer, rank.longest)
            left += activation_bytes(learner, shape, layer, rank.longest) - sum(
                frees.get(module, 0.0) for module in section.parts
            )
            left -= sum(offloaded(learner, shape, layer, rank.longest))
        received = whole if layers[0] and "attention" in learner.offload.activations else 0.0  # the schedule keeps that
        out += received + rank.tokens * left
    return out


def logits_bytes(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Returns bytes on the last stage, with two float32 copies of a chunk, like an entropy bonus needs.

    They are hidden states, logits and both gradients; with TransformerEngine's layers also the weight's gradient, as
    in published peaks (torch frees the logits before it). A float32 head has hidden states, their gradient, a float32
    block of the weight, and its gradient in float32, unless all gradients are accumulated in that."""
    if rank.stage < learner.pp - 1 or shape.has_score_head:
        return 0.0
    rows, size = shape.vocab_size / learner.tp, BYTES[learner.dtype]
    chunk = rows * min(rank.tokens, LOGITS_TOKENS) * 4
    hidden = 2 * shape.hidden_size * rank.tokens * size
    if learner.head_dtype is None:
        logits, weight = 2 * rows * rank.tokens * size + 2 * chunk, rows * shape.hidden_size * size
        return hidden + logits + (weight if wants_transformer_engine(learner, shape) else 0.0)
    block = min(rows, WEIGHT_ROWS) * shape.hidden_size * 4 if size < 4 else 0.0
    of_weight = 0.0 if learner.gradient_dtype == "float32" else rows * shape.hidden_size * 4
    return hidden + of_weight + chunk + max(chunk, block)


def optimizer_bytes(learner: LearnerSection, shape: ModelShape, rank: Rank) -> tuple[float, float]:
    """Returns bytes that stay, and those of a step. AdamW's two moments or Muon's one, and float32 copies of bfloat16
    parameters, are sharded; Muon shards whole parameters, so a rank has at least the embedding's or output layer's.
    A step has float32 copies of gradients. TransformerEngine's Adam with moments of fewer bits reads any dtype, and
    has copies of moments instead."""
    stepped, d, held = rank.stepped(learner), learner.dims, rank.trained_parameters
    if learner.optimizer.moments_dtype != "float32":
        copies = 2 * _MOMENT * min(stepped, max(STEPPED_AT_ONCE, rank.largest))
        return (2 * BYTES["bfloat16"] + BYTES["float32"]) * stepped, copies
    gradients = stepped * BYTES["float32"] if learner.gradient_dtype != "float32" else 0.0
    each = 2 * _MOMENT + (4 if learner.dtype == "bfloat16" else 0)
    dense, experts = float(held.dense * each), float(held.experts * each)
    largest = 0.0
    if learner.optimizer.name == "muon":
        dense, experts = dense - _MOMENT * rank.matrices.dense, experts - _MOMENT * rank.matrices.experts
        if rank.stage in (0, d.pp - 1):
            largest = padded_vocab(shape, d.tp) // d.tp * shape.hidden_size * each
    shared = max(dense / (d.dp * d.cp), largest) + experts * d.etp * d.ep / (d.tp * d.cp * d.dp)
    return shared, gradients
