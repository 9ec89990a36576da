"""Evaluates the policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron.config.run import EvalSection
from rl_megatron.observability.recorder import Row
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Samples one completion of each of ``prompts`` with the weights that were pushed last."""

    sampler: RolloutSampler
    prompts: Sequence[Prompt]
    section: EvalSection

    async def row(self) -> Row:
        """``eval/accuracy``."""
        accuracy = await self.sampler.evaluate(
            self.prompts, temperature=self.section.temperature, success_reward=self.section.success_reward
        )
        return {"eval/accuracy": accuracy}
