"""One rollout batch -> optimizer steps: measure it with the models, assign credit, cut, pack, train.

The controller's process; every tensor here is on the CPU. Everything random is a function of (seed, step, epoch).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.algorithms.corrections import proximal_share, second_moment_mask
from rl_megatron.algorithms.kl import adaptive_beta
from rl_megatron.algorithms.losses import loss_of
from rl_megatron.algorithms.mismatch import expert_metrics, mismatch_metrics
from rl_megatron.algorithms.quantiles import ratio_quantiles
from rl_megatron.bad_steps import BadSteps
from rl_megatron.config.run import RunConfig
from rl_megatron.credit import (
    Memory,
    assign_credit,
    explained_variance,
    mean_over_completions,
    over_right_tokens,
    preference_pairs,
    reference_kl,
    shape_rewards,
)
from rl_megatron.data.packing import pack, packing_metrics, unpack
from rl_megatron.data.samples import split_minibatches, to_samples, with_last_tokens
from rl_megatron.errors import DataError
from rl_megatron.interfaces import Roles, Scorer
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.types import Batch, Prompt, RolloutGroup, Samples, Scores, StepResult

T = TypeVar("T")
QUANTILES = {"ratio/p01": 0.01, "ratio/p50": 0.5, "ratio/p99": 0.99}


@dataclass(slots=True, kw_only=True)
class Update:
    """The optimizer steps on rollout batches."""

    config: RunConfig
    roles: Roles
    attention_cost: float
    memory: Memory = field(init=False)
    policy_steps: BadSteps = field(init=False)
    critic_steps: BadSteps = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(kl_coefficient=self.config.algorithm.kl.coefficient)
        self.policy_steps, self.critic_steps = (
            BadSteps(name=name, most=self.config.train.most_skipped) for name in ("policy", "critic")
        )

    async def __call__(self, groups: Sequence[RolloutGroup], step: int, watch: Stopwatch) -> Row:
        """Train on a rollout batch; its metrics. Nothing is trained where there is no token for it: no group, no
        completion that beats another, all of them left out."""
        section, longest = self.config.algorithm, self.config.rollout.max_new_tokens
        row: Row = {"tokens/train": 0}
        if not groups:
            return row
        rewards = shape_rewards(groups, section, self.memory, max_new_tokens=longest)
        if section.preference_beta is not None:
            groups, rewards = preference_pairs(groups, rewards)
            row["preference/pairs"] = len(groups)
            if not groups:
                self.memory = rewards.memory
                return row
        found = await self._measure(self._samples_of(groups), watch)
        row |= _mismatch_row(found)
        samples, memory = assign_credit(
            found.samples,
            groups,
            rewards,
            section,
            success_reward=self.config.eval.success_reward,
            next_values=found.next_values,
        )
        if not samples.mask.any():
            self.memory = memory
            return row
        samples = self._with_second_moment_limited(samples, found.current, row)
        samples = self._with_proximal_share(samples, groups, step)
        row |= await self._train(samples, step, watch, [group.prompt for group in groups])
        self.memory = self._with_kl_controlled(memory, samples, row)
        return row

    def _samples_of(self, groups: Sequence[RolloutGroup]) -> Samples:
        """With the engine's routes only where they are replayed. Raises DataError where these are not there."""
        samples = to_samples(groups)
        if self.config.algorithm.routing_replay != "r3":
            return replace(samples, routes=None)
        if samples.routes is None:
            raise DataError(
                "algorithm.routing_replay=r3, but these completions came without routes: they were sampled before it "
                "was set; go on with off or r2 until they are trained on, or start anew"
            )
        return samples

    def pack(self, samples: Samples) -> Batch:
        """Micro-batches of the learner's ranks; pairs stay together."""
        learner = self.config.learner
        return pack(
            samples,
            dims=learner.dims,
            max_tokens=learner.max_tokens_per_micro_batch,
            attention_cost=self.attention_cost,
            unit=self._unit,
        )

    @property
    def _unit(self) -> int:
        return 1 if self.config.algorithm.preference_beta is None else 2

    async def _measure(self, samples: Samples, watch: Stopwatch) -> _Measured:
        """What the models say of the rollouts before any of them changes; only what the algorithm needs."""
        section, roles = self.config.algorithm, self.roles
        batch = self.pack(samples)
        asked = section.old_logprobs == "learner" or section.second_moment_limit is not None
        asked |= section.routing_replay == "r2"
        current = next_values = None
        async with AtOnce(watch) as at_once:
            policy = at_once.begin("logprobs", self._policy(batch)) if asked else None
            reference = critic = None
            if roles.reference is not None:
                reference = at_once.begin("reference", roles.reference.score(_by_own_routes(batch)))
            if roles.critic is not None:
                critic = at_once.begin("values", self._values(samples, roles.critic))
            if policy is not None:
                scores, routes = await at_once.end(policy)
                current = unpack(batch, scores, samples)
                if routes is not None:
                    samples = replace(samples, routes=unpack(batch, routes, samples))
                if section.old_logprobs == "learner":
                    samples = replace(samples, old_logprobs=current)
            if reference is not None:
                samples = replace(samples, ref_logprobs=unpack(batch, await at_once.end(reference), samples))
            if critic is not None:
                values, next_values = await at_once.end(critic)
                samples = replace(samples, old_values=values)
        return _Measured(samples, current, next_values)

    async def _policy(self, batch: Batch) -> tuple[Scores, Scores | None]:
        """Log-probs, and routes where they are recorded to be replayed."""
        if self.config.algorithm.routing_replay == "r2":
            return await self.roles.learner.score_with_routes(batch)
        return await self.roles.learner.score(batch), None

    async def _values(self, samples: Samples, critic: Scorer) -> tuple[Tensor, Tensor]:
        """Values [N] before each sampled token, and [S] after each completion's last one."""
        longer, is_last = with_last_tokens(samples)
        batch = self.pack(longer)
        values = unpack(batch, await critic.score(batch), longer)
        return values[~is_last], values[is_last]

    def _with_second_moment_limited(self, samples: Samples, current: Tensor | None, row: Row) -> Samples:
        """M2PO: tokens far off the policy that sampled them get no advantage; denominators stay those of all tokens."""
        limit = self.config.algorithm.second_moment_limit
        if limit is None:
            return samples
        assert current is not None
        kept = second_moment_mask(current - samples.rollout_logprobs, samples.mask, threshold=limit)
        row["correction/dropped_fraction"] = 1 - float(kept.sum() / samples.mask.sum())
        return replace(samples, advantages=torch.where(kept, samples.advantages, 0.0))

    def _with_proximal_share(self, samples: Samples, groups: Sequence[RolloutGroup], step: int) -> Samples:
        """Step s trains version s - 1, the proximal one, into version s."""
        if self.config.algorithm.old_logprobs != "interpolated":
            return samples
        versions = torch.tensor([c.versions[0] for g in groups for c in g.completions])
        everywhere = torch.repeat_interleave(versions, samples.cu_seqlens.diff())
        return replace(samples, proximal_share=proximal_share(everywhere, proximal_version=step - 1, version=step))

    def _with_kl_controlled(self, memory: Memory, samples: Samples, row: Row) -> Memory:
        """The coefficient that follows the KL of this batch, where a target is set; both go into the row."""
        section = self.config.algorithm
        if not section.kl.coefficient:
            return memory
        kl = mean_over_completions(reference_kl(samples, section), samples)
        row |= {"kl/reference": kl, "kl/coefficient": memory.kl_coefficient}
        if section.kl.target is None:
            return memory
        beta = adaptive_beta(
            memory.kl_coefficient,
            kl,
            target=section.kl.target,
            num_samples=samples.num_sequences,
            horizon=section.kl.horizon,
        )
        return replace(memory, kl_coefficient=beta)

    async def _train(self, samples: Samples, step: int, watch: Stopwatch, prompts: Sequence[Prompt]) -> Row:
        """``train.epochs`` passes over the batch, each in minibatches of a fresh order."""
        c, roles = self.config, self.roles
        rate, critic_rate = learning_rate(c, step), critic_learning_rate(c, step)
        loss = loss_of(c.algorithm, kl_coefficient=self.memory.kl_coefficient, max_new_tokens=c.rollout.max_new_tokens)
        value_loss = ValueLoss(clip=c.algorithm.critic.clip)
        packed = map(self.pack, minibatches(samples, c, step, unit=self._unit))
        batches = [batch for batch in packed if batch.num_tokens]  # Adam's momentum moves weights at a gradient of 0
        policy: list[StepResult | None] = []  # None: it was left out
        critic: list[StepResult | None] = []
        for batch in batches:
            async with AtOnce(watch) as at_once:
                trained = valued = None
                if roles.critic is None or step > c.algorithm.critic.only_steps:
                    trained = at_once.begin("train", roles.learner.train_step(batch, loss, rate))
                if roles.critic is not None:
                    asked = roles.critic.train_step(_by_own_routes(batch), value_loss, critic_rate)
                    valued = at_once.begin("critic", asked)
                if trained is not None:
                    policy.append(self.policy_steps.made(await at_once.end(trained), batch, prompts))
                if valued is not None:
                    critic.append(self.critic_steps.made(await at_once.end(valued), batch, prompts))
        row: Row = {"learning_rate": rate, "steps/skipped": [*policy, *critic].count(None), **_advantage_row(samples)}
        row |= packing_metrics(batches, dims=c.learner.dims, attention_cost=self.attention_cost)
        row |= combine([made for made in policy if made is not None])
        if learnt := [made for made in critic if made is not None]:
            row |= {"critic/learning_rate": critic_rate, "critic/explained_variance": explained_variance(samples)}
            row |= _critic_row(learnt)
        return row


class AtOnce:
    """Models are asked at once: where they share processes they answer one after the other, in the order asked.

    A phase's seconds are those that it is waited for alone, so that phases add up to the time that passed.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        return self

    def begin(self, phase: str, question: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Ask, after whatever began before."""
        task = asyncio.create_task(question, name=phase)
        self._tasks.append(task)
        return task

    async def end(self, task: asyncio.Task[T]) -> T:
        """The answer."""
        with self._watch(task.get_name()):
            return await task

    async def __aexit__(self, *_: object) -> None:
        """Where one failed, others are left; an error of theirs would have the same cause."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Measured:
    samples: Samples
    current: Tensor | None  # [N] log-probs of the policy at the start of the update
    next_values: Tensor | None  # [S]


def _mismatch_row(found: _Measured) -> Row:
    """Nothing where the algorithm does not ask the learner before it trains."""
    samples, current = found.samples, found.current
    if current is None:
        return {}
    row: Row = {**mismatch_metrics(current, samples.rollout_logprobs, samples.mask, samples.cu_seqlens)}
    if samples.routes is not None:
        row |= expert_metrics(current, samples.rollout_logprobs, samples.mask, samples.routes)
    return row


def minibatches(samples: Samples, config: RunConfig, step: int, *, unit: int) -> Iterator[Samples]:
    """``train.minibatches`` parts of all samples, ``train.epochs`` times over, each time in an order of its own."""
    count = min(config.train.minibatches, samples.num_sequences // unit)
    for epoch in range(config.train.epochs):
        for part in split_minibatches(samples, count, seed_of(config.seed, step, epoch), unit=unit):
            yield over_right_tokens(part)


def _by_own_routes(batch: Batch) -> Batch:
    """For models whose routers are not the policy's."""
    rows = tuple(tuple(replace(samples, routes=None) for samples in row) for row in batch.micro_batches)
    return replace(batch, micro_batches=rows)


def _advantage_row(samples: Samples) -> Row:
    advantages = samples.advantages[samples.mask].double()
    return {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std(correction=0))}


def _critic_row(results: Sequence[StepResult]) -> Row:
    """The critic's own metrics: its loss, gradient norm and means; the rest of a learner's would hide the policy's."""
    combined = combine(results)
    own = {name: value for name, value in combined.items() if name.startswith("critic/")}
    return {**own, "critic/loss": combined["loss"], "critic/grad_norm": combined["grad_norm"]}


def schedule(config: RunConfig, step: int) -> float:
    """The share of the learning rate at RL step ``step`` (from 1): linear warm-up, then the decay's shape to 0."""
    train = config.train
    warm = min(1.0, step / train.lr_warmup_steps) if train.lr_warmup_steps else 1.0
    left = (train.steps - step + 1) / max(1, train.steps - train.lr_warmup_steps)
    shapes = {"none": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * min(1.0, left))}
    return min(warm, shapes[train.lr_decay])


def learning_rate(config: RunConfig, step: int) -> float:
    """The policy's rate."""
    return config.train.learning_rate * schedule(config, step)


def critic_learning_rate(config: RunConfig, step: int) -> float:
    """The critic's rate, on the same schedule."""
    rate = config.algorithm.critic.learning_rate
    return (config.train.learning_rate if rate is None else rate) * schedule(config, step)


def seed_of(*parts: int) -> int:
    """One 63-bit seed from several numbers, unlike for unlike parts."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def combine(results: Sequence[StepResult]) -> Row:
    """The metrics of several optimizer steps: their means, the extremes of minima and maxima, quantiles of all."""
    if not results:
        return {}
    rows = [{"loss": r.loss, "grad_norm": r.grad_norm, **r.metrics} for r in results]
    over = {"min": min, "max": max}
    row: Row = {name: over.get(name[-3:], _mean)([row[name] for row in rows]) for name in rows[0]}
    if counts := [r.histograms["ratio"] for r in results if "ratio" in r.histograms]:
        total = [math.fsum(column) for column in zip(*counts, strict=True)]
        row |= dict(zip(QUANTILES, ratio_quantiles(total, list(QUANTILES.values())), strict=True))
        first, second = _mean([r.metrics["ratio/mean"] for r in results]), float(row.pop("ratio/second_moment") or 0)
        row["ratio/effective_fraction"] = first**2 / second if second else math.nan
    return row


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
