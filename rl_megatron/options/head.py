"""``learner.vocab_multiple``, ``logprob_chunk_tokens``: from hidden states to log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class HeadKeys(Section):
    """The keys of `OutputHead`."""

    vocab_multiple: Positive = 8
    """The learner pads the vocabulary's rows to a multiple of this times tp."""
    logprob_chunk_tokens: Positive = 1024
    """Most positions whose logits the learner holds in float32 at once."""


class OutputHead(Option):
    """Computes logits in ``learner.dtype``, and log-probs in float32, chunk by chunk (`learner.logprobs`)."""

    keys = HeadKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """No fused cross entropy, because `learner.logprobs` computes it."""
        return Keywords(model={"cross_entropy_loss_fusion": False})

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes on the last stage: the logits, their gradient, and two float32 copies of a chunk."""
        chunk = min(rank.tokens, learner.logprob_chunk_tokens)
        each = 2 * rank.tokens * BYTES[learner.dtype] + 2 * chunk * 4
        last = rank.stage == learner.pp - 1
        return {**terms, "logits": shape.vocab_size / learner.tp * each if last else 0.0}
