"""Prompts -> RolloutGroups: fan out to the engine, decode, score, and handle rewards that fail. Controller process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import RewardError
from rl_megatron.interfaces import RewardFunction, RolloutEngine
from rl_megatron.rewards.scoring import score
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.types import Completion, GenerationRequest, Prompt, RolloutGroup, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """One prompt's group, None where it was dropped, with what its reward said beside the rewards."""

    group: RolloutGroup | None
    errors: int
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of completions without an error


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
    greedy_baseline: bool = False  # whether each group also gets a greedy completion
    routes: bool = False  # whether the engine is asked for those of what is trained on

    async def sample(self, prompts: Sequence[Prompt], *, step: int) -> RolloutBatch:
        """``group_size`` completions of each prompt, scored; groups in the order of ``prompts``.

        Raises RewardError naming the prompt where a reward fails and ``reward.on_error`` is ``fail``.
        """
        section = self.rollout
        choices = (section.group_size, section.temperature, section.top_p)
        scored = await self._run(prompts, f"step {step}", *choices, routes=self.routes)
        if self.greedy_baseline:
            greedy = await self._run(prompts, f"step {step}, greedy", 1, 0.0, 1.0)
            scored = [_with_greedy(*pair) for pair in zip(scored, greedy, strict=True)]
        kept = tuple(s.group for s in scored if s.group is not None)
        rewards = [reward for group in kept for reward in group.rewards]
        parts = _joined_parts([s.parts for s in scored if s.group is not None])
        return RolloutBatch(
            groups=kept,
            num_completions=len(rewards),
            reward_sum=math.fsum(rewards),
            reward_errors=sum(s.errors for s in scored),
            dropped_groups=len(scored) - len(kept),
            part_sums={name: math.fsum(values) for name, values in parts.items()},
            part_completions=max(map(len, parts.values()), default=0),
        )

    async def evaluate(self, prompts: Sequence[Prompt], *, temperature: float, success_reward: float) -> float:
        """Share of ``prompts`` whose one completion gets at least ``success_reward``; a failed reward is no success."""
        scored = await self._run(prompts, "evaluation", 1, temperature, 1.0)
        return sum(s.group is not None and s.group.rewards[0] >= success_reward for s in scored) / len(scored)

    async def _run(
        self,
        prompts: Sequence[Prompt],
        purpose: str,
        count: int,
        temperature: float,
        top_p: float,
        *,
        routes: bool = False,
    ) -> list[_Scored]:
        try:
            async with asyncio.TaskGroup() as tasks:
                requests = [self._request(p, purpose, count, temperature, top_p, routes) for p in prompts]
                pairs = zip(prompts, requests, strict=True)
                running = [tasks.create_task(self._group(prompt, request)) for prompt, request in pairs]
        except ExceptionGroup as failed:  # the first is the cause; callers catch it by its type
            raise failed.exceptions[0] from failed
        return [task.result() for task in running]

    def _request(
        self, prompt: Prompt, purpose: str, count: int, temperature: float, top_p: float, routes: bool
    ) -> GenerationRequest:
        digest = hashlib.sha256(f"{self.seed}\n{purpose}\n{prompt.id}".encode()).digest()
        return GenerationRequest(
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
            routes=routes,
        )

    def _texts(self, completions: Sequence[Completion]) -> tuple[str, ...]:
        return tuple(self.decode(completion.token_ids) for completion in completions)

    async def _group(self, prompt: Prompt, request: GenerationRequest) -> _Scored:
        completions = tuple(await self.engine.generate(request))
        texts = await asyncio.to_thread(self._texts, completions)  # long ones would hold up the event loop
        scores = await score(self.reward_function, prompt, completions, texts, limit=self.reward.timeout_seconds)
        rewards, parts, errors = scores.rewards, scores.parts, scores.errors
        if errors:
            on_error = self.reward.on_error
            function = ", ".join(self.reward.functions.values())
            message = f"reward {function!r} of prompt {prompt.id!r}: {'; '.join(scores.problems)}"
            if on_error == "fail":
                raise RewardError(f"{message}; mend it, or set reward.on_error to drop or to a number")
            logger.warning("%s", message)
            if on_error == "drop":
                return _Scored(group=None, errors=errors)
            parts = {name: tuple(v for v, r in zip(p, rewards, strict=True) if r == r) for name, p in parts.items()}
            rewards = tuple(float(on_error) if math.isnan(r) else r for r in rewards)
        group = RolloutGroup(prompt=prompt, completions=completions, texts=texts, rewards=rewards)
        return _Scored(group=group, errors=errors, parts=parts)


def _joined_parts(groups: Sequence[Mapping[str, tuple[float, ...]]]) -> dict[str, list[float]]:
    """The values of each part over all groups; none for a part without a value."""
    names = dict.fromkeys(name for parts in groups for name, values in parts.items() if values)
    return {name: [value for parts in groups for value in parts.get(name, ())] for name in names}


def _with_greedy(sampled: _Scored, greedy: _Scored) -> _Scored:
    """The sampled group with the greedy completion; None where either was dropped."""
    errors = sampled.errors + greedy.errors
    if sampled.group is None or greedy.group is None:
        return _Scored(group=None, errors=errors)
    group = replace(sampled.group, greedy=greedy.group)
    return replace(sampled, group=group, errors=errors)
