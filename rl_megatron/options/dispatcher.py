"""The dispatcher that sends tokens to the ranks of their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class Dispatcher(Option):
    """An all-to-all, because megatron-core's all-gather needs micro-batches of equal length, and ours are packed."""

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Sets the dispatcher for dense models too: megatron-core checks it against ``variable_seq_lengths``."""
        return Keywords(model={"moe_token_dispatcher_type": "alltoall", "variable_seq_lengths": True})
