"""What evaluations ask of a source of groups: held-out problems, sampled as a set says."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rollout.batch import Answered, GroupSource
from rl_megatron.types import Prompt, SamplingParams

Tell = Callable[[int], None]
"""Called with the number of samples that have just been scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySampler(GroupSource):
    """A GroupSource that samples held-out problems too. Seeds are functions of ``seed``."""

    engine: RolloutEngine
    rollout: RolloutSection
    stop_token_ids: tuple[int, ...]
    seed: int

    def params(
        self,
        *,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_new_tokens: int | None = None,
        router_noise: float = 0.0,
    ) -> SamplingParams:
        """How to sample a completion or a turn, with the run's stop tokens; without ``max_new_tokens`` it has
        rollout.max_new_tokens at most."""
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_new_tokens=max_new_tokens or self.rollout.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            router_noise=router_noise,
        )

    @abstractmethod
    async def held_out(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        purpose: str = "evaluation",
        samples: int = 1,
        tell: Tell | None = None,
    ) -> list[Answered]:
        """``samples`` of each prompt, not to train on: log-probs may be of another distribution.

        ``purpose`` names the set; seeds depend on it. Raises EngineError, and what `groups` raises.
        """
