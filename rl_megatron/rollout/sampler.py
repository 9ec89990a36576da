"""Prompts -> RolloutGroups: fan out to the engine, decode, score, and handle rewards that fail. Controller process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from rl_megatron.config import RewardSection, RolloutSection
from rl_megatron.errors import RewardError
from rl_megatron.interfaces import RewardFunction, RolloutEngine
from rl_megatron.types import Completion, GenerationRequest, Prompt, RolloutGroup, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups of one ``sample`` and what went wrong on the way."""

    groups: tuple[RolloutGroup, ...] = ()
    num_completions: int = 0  # scored, those of groups left out later among them
    reward_sum: float = 0.0  # of these
    reward_errors: int = 0  # completions whose reward raised, was late or was not finite
    dropped_groups: int = 0  # groups left out for it
    filtered_groups: int = 0  # groups left out because their rewards were equal

    def informative(self) -> RolloutBatch:
        """Without the groups whose rewards are all equal: their advantages are zero (DAPO, arXiv:2503.14476)."""
        kept = tuple(group for group in self.groups if len(set(group.rewards)) > 1)
        return replace(self, groups=kept, filtered_groups=self.filtered_groups + len(self.groups) - len(kept))

    def joined(self, other: RolloutBatch) -> RolloutBatch:
        """Both, this one's groups first."""
        names = (field.name for field in fields(self))
        return RolloutBatch(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def cut(self, num_groups: int) -> RolloutBatch:
        """The first ``num_groups`` groups."""
        return replace(self, groups=self.groups[:num_groups])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSampler:
    """Samples and scores. Seeds are functions of (run seed, step, prompt id), so a step can be repeated exactly."""

    engine: RolloutEngine
    reward_function: RewardFunction
    decode: Callable[[Sequence[int]], str]
    rollout: RolloutSection
    reward: RewardSection
    stop_token_ids: tuple[int, ...]
    seed: int
    greedy_baseline: bool = False  # whether each group also gets the reward of a greedy completion

    async def sample(self, prompts: Sequence[Prompt], *, step: int) -> RolloutBatch:
        """``group_size`` completions of each prompt, scored; groups in the order of ``prompts``.

        Raises RewardError naming the prompt where a reward fails and ``reward.on_error`` is ``fail``.
        """
        section = self.rollout
        groups = await self._run(prompts, f"step {step}", section.group_size, section.temperature, section.top_p)
        if self.greedy_baseline:
            greedy = await self._run(prompts, f"step {step}, greedy", 1, 0.0, 1.0)
            groups = [_with_greedy(*pair) for pair in zip(groups, greedy, strict=True)]
        kept = tuple(group for group, _ in groups if group is not None)
        rewards = [reward for group in kept for reward in group.rewards]
        return RolloutBatch(
            groups=kept,
            num_completions=len(rewards),
            reward_sum=math.fsum(rewards),
            reward_errors=sum(errors for _, errors in groups),
            dropped_groups=sum(group is None for group, _ in groups),
        )

    async def evaluate(self, prompts: Sequence[Prompt], *, temperature: float, success_reward: float) -> float:
        """Share of ``prompts`` whose one completion gets at least ``success_reward``; a failed reward is no success."""
        groups = await self._run(prompts, "evaluation", 1, temperature, 1.0)
        return sum(group is not None and group.rewards[0] >= success_reward for group, _ in groups) / len(groups)

    async def _run(
        self, prompts: Sequence[Prompt], purpose: str, count: int, temperature: float, top_p: float
    ) -> list[tuple[RolloutGroup | None, int]]:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._group(prompt, purpose, count, temperature, top_p)) for prompt in prompts
                ]
        except ExceptionGroup as failed:  # the first is the cause; callers catch it by its type
            raise failed.exceptions[0] from failed
        return [task.result() for task in running]

    async def _group(
        self, prompt: Prompt, purpose: str, count: int, temperature: float, top_p: float
    ) -> tuple[RolloutGroup | None, int]:
        """One prompt's group and its number of reward errors; None where it is dropped for them."""
        digest = hashlib.sha256(f"{self.seed}\n{purpose}\n{prompt.id}".encode()).digest()
        request = GenerationRequest(
            id=f"{purpose}: {prompt.id}",
            token_ids=prompt.token_ids,
            num_completions=count,
            params=SamplingParams(
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=self.rollout.max_new_tokens,
                stop_token_ids=self.stop_token_ids,
                seed=int.from_bytes(digest[:8], "little") >> 1,
            ),
        )
        completions = tuple(await self.engine.generate(request))
        texts = tuple(self.decode(c.token_ids) for c in completions)
        rewards, problems = await self._score(prompt, completions, texts)
        if problems:
            on_error = self.reward.on_error
            message = f"reward {self.reward.function!r} of prompt {prompt.id!r}: {'; '.join(problems)}"
            if on_error == "fail":
                raise RewardError(f"{message}; mend it, or set reward.on_error to drop or to a number")
            logger.warning("%s", message)
            if on_error == "drop":
                return None, len(problems)
            rewards = tuple(float(on_error) if math.isnan(r) else r for r in rewards)
        return RolloutGroup(prompt=prompt, completions=completions, texts=texts, rewards=rewards), len(problems)

    async def _score(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> tuple[tuple[float, ...], list[str]]:
        """Rewards, NaN where one failed, and a line for each that did."""
        failed = (math.nan,) * len(completions)
        limit = self.reward.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                given = await self.reward_function(prompt, completions, texts)
            rewards = tuple(float(r) for r in given)
        except TimeoutError:
            return failed, [f"no answer in reward.timeout_seconds={limit}"] * len(completions)
        except Exception as error:  # noqa: BLE001  the user's code: whatever it raises is named and counted
            return failed, [f"raised {type(error).__name__}: {error}"] * len(completions)
        if len(rewards) != len(completions):
            return failed, [f"gave {len(rewards)} rewards for {len(completions)} completions"] * len(completions)
        problems = [
            f"completion {i} got {r}, which is not finite" for i, r in enumerate(rewards) if not math.isfinite(r)
        ]
        return tuple(r if math.isfinite(r) else math.nan for r in rewards), problems


def _with_greedy(
    sampled: tuple[RolloutGroup | None, int], greedy: tuple[RolloutGroup | None, int]
) -> tuple[RolloutGroup | None, int]:
    """The sampled group with the greedy completion's reward; None where either was dropped."""
    (group, errors), (baseline, more) = sampled, greedy
    if group is None or baseline is None:
        return None, errors + more
    return replace(group, greedy_reward=baseline.rewards[0]), errors + more
