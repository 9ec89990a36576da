"""Rewards a completion that matches a regular expression as a whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.errors import ConfigError
from rl_megatron.rewards.threads import in_daemon_thread
from rl_megatron.types import Completion, Prompt, Scored


class FormatReward:
    """1.0 if ``pattern`` matches a text from its first character to its last, else 0.0.

    Matching holds the interpreter's lock, so no time limit can end a pattern that backtracks endlessly.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """1.0 or 0.0 for each text."""
        matches = self._pattern.fullmatch
        return await in_daemon_thread(lambda: [Scored(total=float(matches(text) is not None)) for text in texts])


def format_reward(section: RewardSection) -> FormatReward:
    """The reward of ``reward.format``. Raises ConfigError if it has no pattern."""
    if section.format.pattern is None:
        raise ConfigError(
            "the reward function format needs reward.format.pattern, a regular expression for the whole completion, "
            r"for example reward.format.pattern='(?s)<think>.*</think>\s*\S.*'"
        )
    return FormatReward(section.format.pattern)
