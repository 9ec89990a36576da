"""Rewards a completion that matches a regular expression as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.bounded import BoundedProcess, LimitExceeded, ProcessFailed
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.threads import in_daemon_thread
from rl_megatron.types import Completion, Prompt, Scored

LIMIT_SECONDS = 3.0  # processor time for one completion; most patterns take microseconds


class FormatReward:
    """1.0 if ``pattern`` matches a text from its first character to its last, else 0.0, also for a text over which it
    takes 3 s of a processor.

    Another process matches, because a pattern that backtracks holds Python's lock until it ends.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern, self._process = pattern, BoundedProcess("rl_megatron.rewards.format_worker")

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """1.0 or 0.0 for each text. Raises RewardError for a process that does not start, is killed or stands still."""
        return await in_daemon_thread(lambda: [Scored(total=float(self._matches(text))) for text in texts])

    def _matches(self, text: str) -> bool:
        try:
            return bool(self._process.ask(LIMIT_SECONDS, self._pattern, text))
        except LimitExceeded:
            return False
        except ProcessFailed as error:
            raise RewardError(f"format: {error}") from error


def format_reward(section: RewardSection) -> FormatReward:
    """The reward of ``reward.format``. Raises ConfigError if it has no pattern."""
    if section.format.pattern is None:
        raise ConfigError(
            "the reward function format needs reward.format.pattern, a regular expression for the whole completion, "
            r"for example reward.format.pattern='(?s)<think>.*</think>\s*\S.*'"
        )
    return FormatReward(section.format.pattern)
