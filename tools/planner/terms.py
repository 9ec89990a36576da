"""Bytes of a trained model on one rank of the learner, by purpose, before anything is beside it. No torch."""

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
_MOMENTS = 8 / 12  # of the bytes of the optimizer's state
_CHANGES: Mapping[str, str] = {
    "fp8 weights": "raise learner.tp, learner.pp or learner.ep",
}


def changes() -> Mapping[str, str]:
    """What makes each term smaller that only some keys have, of features too, by term."""
    return {**_CHANGES, **{term: say for one in feature.features().values() for term, say in one.changes.items()}}


def memory(learner: LearnerSection, shape: ModelShape, rank: Rank) -> Terms:
    """Bytes of a trained model on a rank, of which ``step`` are there only while the optimizer steps.

    Raises ConfigError if a feature's `changes` lacks one of its terms.
    """
    optimizer, step = optimizer_bytes(learner, shape, rank)
    chunks = learner.stages or (1,) * (learner.pp * learner.vpp)
    held = num_in_flight(learner.pp, rank.stage, chunks[rank.stage :: learner.pp])
    halves = [offloaded(learner, shape, layer, rank.longest) for layer in rank.layers]
    leaving = max((sum(some) / len(some) for some in halves if some), default=0.0) * HELD * rank.tokens
    terms: Terms = {
        "parameters": float(rank.parameters.both * BYTES[learner.dtype]),
        "gradients": float(rank.trained.both * BYTES[learner.gradient_dtype]),
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


def kept_bytes(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Bytes of one micro-batch's activations that stay on the GPU while others are computed."""
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
    """Bytes on the last stage, with two float32 copies of a chunk, as an entropy bonus has.

    Hidden states, logits and the gradients of both, and with TransformerEngine's layers that of the weight, before
    which torch frees the logits, but published peaks have it; or, with a float32 head, hidden states, their
    gradient, a float32 block of the weight, and its gradient in float32, unless all are added up in that."""
    if rank.stage < learner.pp - 1 or shape.scores:
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
    """Bytes that stay: AdamW's two moments, or Muon's one, and, with bfloat16 parameters, float32 copies, shared out,
    with Muon by whole parameters: a rank has at least the embedding's or the output layer's. And those of a step:
    float32 copies of gradients, except for TransformerEngine's Adam, which reads any dtype where it keeps moments in
    fewer bits, and then has copies of those."""
    stepped, d, held = rank.stepped(learner), learner.dims, rank.trained
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
