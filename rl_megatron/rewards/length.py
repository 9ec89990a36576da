"""Rewards completions whose number of tokens is in a range."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.config.sections.reward import LengthSection, RewardSection
from rl_megatron.errors import ConfigError
from rl_megatron.types import Completion, Prompt, Scored


class LengthReward:
    """1.0 from ``min_tokens`` to ``max_tokens``; d tokens outside, max(0, 1 - d / falloff_tokens).

    The stop token counts, as in the metric response/length_mean.
    """

    def __init__(self, section: LengthSection) -> None:
        self._section = section

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """A reward for each completion, from its number of tokens alone."""
        return [Scored(total=self._of(len(completion.token_ids))) for completion in completions]

    def _of(self, tokens: int) -> float:
        section = self._section
        above = tokens - section.max_tokens if section.max_tokens is not None else 0
        outside = max(0, section.min_tokens - tokens, above)
        if outside == 0:
            return 1.0
        return max(0.0, 1 - outside / section.falloff_tokens) if section.falloff_tokens else 0.0


def length_reward(section: RewardSection) -> LengthReward:
    """The reward of ``reward.length``. Raises ConfigError if it prefers no length."""
    if section.length.max_tokens is None and section.length.min_tokens == 0:
        raise ConfigError(
            "the reward function length gives every completion 1; set reward.length.max_tokens or "
            "reward.length.min_tokens"
        )
    return LengthReward(section.length)
