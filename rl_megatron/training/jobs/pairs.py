"""Offline DPO: trains on preference pairs from the data instead of sampled completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import DataError
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.training.group_job import GroupJob
from rl_megatron.types import Completion, Prompt, RolloutGroup, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, kw_only=True)
class PreferencePairs(GroupJob):
    """Makes groups of two: a prompt's answer with reward 1 and its rejected one with reward 0, both ended by ``eos``.

    Their log-probs are 0, as no policy sampled them.
    """

    tokenizer: PreTrainedTokenizerBase
    eos: int

    @override
    async def take(self) -> RolloutBatch:
        """Pairs of the next prompts. Raises DataError for an answer that is too long."""
        prompts = self.prompts.take(self.config.rollout.prompts_per_step)
        groups = tuple(self._group(prompt, self.number - 1) for prompt in prompts)
        return RolloutBatch(groups=groups, num_completions=2 * len(groups), reward_sum=float(len(groups)))

    def _group(self, prompt: Prompt, version: int) -> RolloutGroup:
        texts = (prompt.answer, *prompt.rejected)
        completions = tuple(self._completion(prompt, text, version) for text in texts)
        return single_turns(prompt, completions, texts, (1.0, 0.0))

    def _completion(self, prompt: Prompt, text: str, version: int) -> Completion:
        tokens, most = (*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.eos), self._longest
        if len(tokens) > most:
            raise DataError(
                f"prompt {prompt.id!r}: the answer {text!r:.60} has {len(tokens)} tokens, its end included, but "
                f"rollout.max_new_tokens={most}; raise it"
            )
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            finish_reason="stop",
            spans=(Span(0, version),),
        )

    @property
    def _longest(self) -> int:
        return self.config.rollout.max_new_tokens
