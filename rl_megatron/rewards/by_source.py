"""Scores completions by the reward of their prompt's source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_megatron.interfaces import RewardFunction
from rl_megatron.types import Completion, Prompt, Scored


class BySource:
    """A source that is not in ``own`` has the reward ``otherwise``."""

    def __init__(self, otherwise: RewardFunction, own: Mapping[str, RewardFunction]) -> None:
        self._otherwise, self._own = otherwise, own

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[Scored]:
        """Raises what that reward raises."""
        return await self._own.get(prompt.source, self._otherwise)(prompt, completions, texts)
