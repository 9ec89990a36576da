"""Pairs of a better and a worse answer from the data, in the place of sampled completions: offline DPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_megatron.errors import DataError
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.types import Completion, Prompt, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePairs:
    """Groups of two: the prompt's answer with reward 1 and its rejected one with reward 0, both ended by ``eos``."""

    tokenizer: PreTrainedTokenizerBase
    eos: int
    max_new_tokens: int

    async def sample(self, prompts: Sequence[Prompt], *, step: int) -> RolloutBatch:
        """As RolloutSampler.sample. Log-probs are 0: nobody sampled these. Raises DataError for too long an answer."""
        groups = tuple(self._group(prompt, step - 1) for prompt in prompts)
        return RolloutBatch(groups=groups, num_completions=2 * len(groups), reward_sum=float(len(groups)))

    def _group(self, prompt: Prompt, version: int) -> RolloutGroup:
        texts = (prompt.answer, *prompt.rejected)
        completions = tuple(self._completion(prompt, text, version) for text in texts)
        return RolloutGroup(prompt=prompt, completions=completions, texts=texts, rewards=(1.0, 0.0))

    def _completion(self, prompt: Prompt, text: str, version: int) -> Completion:
        tokens = (*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.eos)
        if len(tokens) > self.max_new_tokens:
            raise DataError(
                f"prompt {prompt.id!r}: the answer {text!r:.60} has {len(tokens)} tokens with its end, "
                f"rollout.max_new_tokens={self.max_new_tokens}; raise it"
            )
        return Completion(
            token_ids=tokens, logprobs=(0.0,) * len(tokens), finish_reason="stop", versions=(version, version)
        )
