"""``learner.vocab_multiple``, ``logprob_chunk_tokens``: from hidden states to log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class HeadKeys(Section):
    """Its keys."""

    vocab_multiple: Positive = 8
    """Vocabulary rows are padded to a multiple of this times tp."""
    logprob_chunk_tokens: Positive = 1024
    """Positions whose logits are held in float32 at once."""


class OutputHead(Option):
    """Logits in ``learner.dtype``; log-probs in float32, chunk by chunk (`learner.logprobs`)."""

    keys = HeadKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Cross entropy is not megatron-core's."""
        return Keywords(model={"cross_entropy_loss_fusion": False})

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """On the last stage the logits, their gradient, and two float32 copies of a chunk."""
        chunk = min(rank.tokens, learner.logprob_chunk_tokens)
        each = 2 * rank.tokens * BYTES[learner.dtype] + 2 * chunk * 4
        last = rank.stage == learner.pp - 1
        return {**terms, "logits": shape.vocab_size / learner.tp * each if last else 0.0}
