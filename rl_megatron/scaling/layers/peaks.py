"""What a rank of the learner holds while one of its layers computes, beside what all layers keep. Without torch.

Dry runs count the same of torch's layers (tests/recipes): the way to the experts and back has four copies of the rows
at once, and their backward pass two beside the gradients of the layer's experts. Of TransformerEngine's layers, which
they cannot count, it is twice what a layer makes, an upper bound that lies within 3 % of published peaks.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.implementation import multiplies_at_once, wants_transformer_engine
from rl_megatron.options.kept import delta_bytes, freed, halves, kept, probabilities
from rl_megatron.options.option import BYTES, Rank

_ALONE = {"moe_act"}
"""Modules that torch's layers compute again for one expert after the other, but where they take all at once."""


def beside_kept(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Most bytes that a pass of ``rank`` holds beside what its layers keep of micro-batches."""
    size, d = BYTES[learner.dtype], learner.dims
    kinds = {n: (n in shape.moe_layers, n in shape.delta_layers) for n in rank.layers}
    unlike = {(kinds[n], shape.windows[n] if shape.windows else 0): n for n in rank.layers}.values()
    most = max((_one(learner, shape, rank, layer) for layer in unlike), default=0.0)
    hidden = rank.tokens * shape.hidden_size * size
    around = hidden if d.tp > 1 else 0.0  # megatron's buffer of sequence parallelism
    around += hidden / d.tp * _between_stages(learner, shape, rank)
    return max(most + _group(learner, shape, rank), _embedding(learner, shape, rank)) + around


def _between_stages(learner: LearnerSection, shape: ModelShape, rank: Rank) -> int:
    """Gradients that megatron's schedule holds while a micro-batch passes backward: of the stage's output, as received,
    which a whole layer that is computed again counts itself; and of its input of the micro-batch before, as sent."""
    counted = learner.recompute.uniform is not None and not wants_transformer_engine(learner, shape)
    return (rank.stage > 0) + (rank.stage < learner.pp - 1 and not counted)


def in_forward(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Most bytes that a pass without gradients holds: all that one layer makes, kept or not."""
    return max((_made(learner, shape, rank, layer) for layer in rank.layers), default=0.0)


def _one(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """What ``layer`` computes again for its backward pass, and what its larger half holds beside that."""
    if wants_transformer_engine(learner, shape):
        gradients = _gradients(learner, shape, layer, matrices=2)
        return 2 * _made(learner, shape, rank, layer) + max(gradients, _embedding(learner, shape, rank))
    parts = halves(learner, shape, layer, rank.longest)
    if (
        learner.recompute.uniform is not None
    ):  # its input is kept already, and in its place comes the gradient of its output
        again, attention = sum(parts.values()), parts["attention"]
    else:
        frees = freed(learner, shape, layer, rank.longest)
        alone = set() if multiplies_at_once(learner, shape) else _ALONE
        again = attention = sum(frees.get(module, 0.0) for module in {*learner.recompute.modules} - alone)
    mlp = (_experts if layer in shape.moe_layers else _dense)(learner, shape, rank, layer)
    gradients = sum(_attention(shape, layer)) * BYTES[learner.dtype] / learner.tp
    gradients += delta_bytes(learner, shape, layer)
    scores = probabilities(learner, shape, layer, rank.longest)
    return max(rank.tokens * again + mlp, rank.tokens * (attention + gradients + 2 * scores))


def _experts(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """Bytes beside what a layer with experts keeps: in its forward pass rows as sorted, as they arrived, as they left
    the experts and as sorted back; in the backward pass the gradients of outputs and inputs, of all
    experts' weights, which return together, and one expert's products.

    Or the products of all experts at once, with their weights laid side by side: at first four as wide as experts, six
    of those with biases, and then the gradients of two, beside those of the weights
    (tests/unit/options/test_bytes.py measures it)."""
    d, size = learner.dims, BYTES[learner.dtype]
    rows = rank.tokens * shape.experts_per_token / d.tp
    one = rows * shape.hidden_size * size
    apart = d.ep * d.etp > 1
    forward = 2 * one * (1 + d.etp) if apart else one
    forward += rank.tokens * shape.hidden_size / d.tp * size if shape.shared_width else 0.0
    if multiplies_at_once(learner, shape):
        inside = rows * shape.expert_width * size
        together = shape.expert_bias or shape.stacked_experts
        first = one * d.etp + (6 if shape.expert_bias else 4) * inside + _gradients(learner, shape, layer, matrices=3)
        last = 2 * one * d.etp + 2 * inside + _gradients(learner, shape, layer, matrices=3 if together else 5)
        return max(forward, first, last)
    gradients = _gradients(learner, shape, layer, matrices=3)
    products = 8 * rows * shape.expert_width * d.ep / shape.num_experts * size
    return max(forward, 2 * one * d.etp + gradients + products)


def _dense(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """Bytes beside what a dense layer keeps: gradients of gate and up, or of their weights; or before these the
    output's gradient, which sequence parallelism gathers, with those of down's input and weight."""
    size = BYTES[learner.dtype]
    product, one = shape.dense_width / learner.tp * rank.tokens * size, _gradients(learner, shape, layer, matrices=1)
    gathered = rank.tokens * shape.hidden_size * size + product + one if learner.tp > 1 else 0.0
    return max(2 * product, 2 * one, gathered)


def _gradients(learner: LearnerSection, shape: ModelShape, layer: int, *, matrices: int) -> float:
    """Bytes of the gradients that are there at once before they are added up: of ``matrices`` of a dense ``layer``, or
    of all its experts."""
    d, size = learner.dims, BYTES[learner.dtype]
    if layer in shape.moe_layers:
        apart = shape.stacked_experts and not multiplies_at_once(learner, shape)
        matrices *= 2 if apart else 1  # which are then put together
        return matrices * shape.hidden_size * shape.expert_width * shape.num_experts / d.ep / d.etp * size
    return matrices * shape.hidden_size * shape.dense_width / d.tp * size


def _embedding(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Bytes of the embedding's gradient."""
    return shape.hidden_size * shape.vocab_size / learner.tp * BYTES[learner.dtype] if rank.stage == 0 else 0.0


def _group(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Bytes that layers keep which are recomputed together with the one that computes (``recompute.uniform``)."""
    together = (learner.recompute.uniform or 1) - 1
    if not together:
        return 0.0
    most = max((kept(learner, shape, layer, rank.longest) for layer in rank.layers), default=0.0)
    return together * most * rank.tokens


def _made(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """Bytes that ``rank`` makes while it computes one layer, kept or not."""
    d, hidden = learner.dims, shape.hidden_size
    per_token = 4.0 * hidden + sum(_attention(shape, layer))  # inputs and outputs of both norms
    if layer in shape.moe_layers:
        chosen = shape.experts_per_token
        per_token += chosen * (4 * hidden * d.etp + 3 * shape.expert_width)  # sent, arrived, left, combined
        per_token += 3 * shape.shared_width + 2 * shape.num_experts
    else:  # sequence parallelism gathers what comes into the MLP
        per_token += 3 * shape.dense_width + hidden * (d.tp if d.tp > 1 else 0)
    plain = probabilities(learner, shape, layer, rank.longest)
    return rank.tokens * (per_token / d.tp * BYTES[learner.dtype] + plain + delta_bytes(learner, shape, layer))


def _attention(shape: ModelShape, layer: int) -> Iterator[float]:
    """Elements per token of queries, keys, values and the output, before and after rotation; or what a delta net's
    linears give and take."""
    heads = shape.num_heads
    if shape.delta is not None and layer in shape.delta_layers:
        yield shape.delta.inputs + shape.delta.outputs
        return
    if shape.output_gate:
        yield 2 * heads * shape.head_dim  # as projected, and multiplied
    if (latent := shape.latent) is None:
        yield (2 * heads + 2 * shape.num_kv_heads) * shape.head_dim  # q, k, v and the output
        yield (heads + shape.num_kv_heads) * shape.head_dim  # rotated q and k
        return
    yield (latent.query_rank or 0) + latent.kv_rank + latent.rope_dim
    yield heads * (2 * (latent.nope_dim + latent.rope_dim) + 2 * latent.value_dim)
