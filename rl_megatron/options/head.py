"""``learner.head_dtype``: from hidden states to log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rl_megatron.options.implementation import wants_transformer_engine
from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


WEIGHT_ROWS = 8192
"""Rows of an output layer in half precision of which the learner holds float32 copies at once."""
LOGITS_TOKENS = 1024
"""Most positions whose logits the learner holds in float32 at once."""


class HeadKeys(Section):
    """The key of `OutputHead`."""

    head_dtype: Literal["float32"] | None = None
    """float32: the policy's logits are float32 products of hidden states and the output layer's weight, which exist a
    chunk at a time, and are computed again in the backward pass. null: logits in ``learner.dtype``, all at once."""


class OutputHead(Option):
    """Computes log-probs in float32, chunk by chunk, from logits or from hidden states (`learner.logprobs`)."""

    keys = HeadKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """No fused cross entropy, because `learner.logprobs` computes it."""
        return Keywords(model={"cross_entropy_loss_fusion": False})

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes on the last stage, with two float32 copies of a chunk, as an entropy bonus has.

        Hidden states, logits and the gradients of both, and with TransformerEngine's layers that of the weight, before
        which torch frees the logits, but published peaks have it; or, with a float32 head, hidden states, their
        gradient, a float32 block of the weight, and its gradient in float32, unless all are added up in that; then,
        where gradients overlap, zeros of its size for autograd."""
        if rank.stage < learner.pp - 1 or shape.scores:
            return {**terms, "logits": 0.0}
        rows, size = shape.vocab_size / learner.tp, BYTES[learner.dtype]
        chunk = rows * min(rank.tokens, LOGITS_TOKENS) * 4
        hidden = 2 * shape.hidden_size * rank.tokens * size
        if learner.head_dtype is None:
            logits, weight = 2 * rows * rank.tokens * size + 2 * chunk, rows * shape.hidden_size * size
            return {**terms, "logits": hidden + logits + (weight if wants_transformer_engine(learner, shape) else 0.0)}
        block = min(rows, WEIGHT_ROWS) * shape.hidden_size * 4 if size < 4 else 0.0
        of_weight = 0.0 if learner.gradient_dtype == "float32" else rows * shape.hidden_size * 4
        announced = rows * shape.hidden_size * size if learner.overlap.gradients else 0.0
        return {**terms, "logits": hidden + max(of_weight + chunk + max(chunk, block), announced)}
