"""Trains on one rollout batch: scores it with the models, assigns credit, splits it into minibatches, packs, trains.

Runs in the controller process; every tensor here is on the CPU. Randomness is a function of (seed, step, epoch). Work
on every token runs in a thread, so that the event loop can serve ranks and engines.

Selects the completions and the tokens of a batch that an update trains on, and how many sequences are packed as a
unit.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import to_thread
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.algorithms.corrections import proximal_share, second_moment_mask
from rl_megatron.algorithms.losses import policy_loss, token_weight
from rl_megatron.algorithms.mismatch import mismatch_metrics
from rl_megatron.algorithms.objectives import ClipLimits
from rl_megatron.algorithms.own import check_custom_advantages, check_custom_objective, check_custom_pair_loss
from rl_megatron.algorithms.segments import differ
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.packing import finish_minibatch, minibatch_token_mask, unpack
from rl_megatron.data.samples import computed_lengths, for_pass, to_samples, with_demonstrations
from rl_megatron.errors import DataError
from rl_megatron.feature import Judges, StepHooks, step_hooks
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.seeds import make_seed
from rl_megatron.training.credit import AlgorithmState, ShapedRewards, assign_credit, describe_kl, shape_rewards
from rl_megatron.training.optimizer_steps import (
    CompletedStep,
    KLLimitReached,
    OptimizerSteps,
    critic_learning_rate,
    critic_row,
    learning_rate,
    policy_row,
)
from rl_megatron.training.scores import Packers, RankTasks, ScoredSamples, score_batch
from rl_megatron.types import Batch, Loss, Prompt, RolloutGroup, Samples, Want

_TRAINED = ("top_entropy", "second_moment")  # the tokens that are chosen are those that are trained on


def preference_pairs(
    groups: Sequence[RolloutGroup], rewards: ShapedRewards
) -> tuple[Sequence[RolloutGroup], ShapedRewards]:
    """Keeps the best and the worst completion, in this order, of every group whose ``rewards`` differ, for DPO."""
    pairs, kept = [], []
    for group, values in zip(groups, rewards.values.split([len(g.rewards) for g in groups]), strict=True):
        of_group = values.tolist()
        best, worst = (of_group.index(choice(of_group)) for choice in (max, min))
        if of_group[best] > of_group[worst]:
            pairs.append(replace(group, trajectories=(group.trajectories[best], group.trajectories[worst])))
            kept += [of_group[best], of_group[worst]]
    return pairs, replace(rewards, values=torch.tensor(kept))


def top_entropy(entropy: Tensor, share: float) -> Tensor:
    """Marks the tokens of the ``share`` of greatest entropy, rounded up, [n] bool; with those that equal the least of
    them (arXiv:2506.01939, eq. 6)."""
    num = math.ceil(share * len(entropy))
    return entropy >= entropy.topk(num).values[-1]


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Returns each token's term of the covariance of log-prob and advantage, [n] float64 (arXiv:2505.22617, eq. 10)."""
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def random_in_range(values: Tensor, share: float, low: float, high: float, generator: torch.Generator) -> Tensor:
    """Marks ``share`` of all tokens, drawn from those with a value in low .. high, [n] bool: Clip-Cov."""
    (candidates,) = torch.where((values >= low) & (values <= high))
    order = torch.randperm(len(candidates), generator=generator)
    return _at(candidates[order[: _num(share, len(values))]], len(values))


def top_share(values: Tensor, share: float) -> Tensor:
    """Marks exactly ``share`` of the tokens, those of greatest value, the first of equal ones, [n] bool: KL-Cov."""
    order = values.argsort(descending=True, stable=True)
    return _at(order[: _num(share, len(values))], len(values))


def _num(share: float, count: int) -> int:
    """Rounds down, but to one at least, as in the code of the paper of both."""
    return max(int(share * count), 1)


def _at(places: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[places] = True
    return chosen


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Chooses tokens of each minibatch by scores [N] of the policy at the start of the update. It runs on the
    controller: the same tokens for every layout."""

    algorithm: AlgorithmSection
    logprobs: Tensor
    entropy: Tensor | None
    generator: torch.Generator
    shares: list[float] = field(default_factory=list)  # share of chosen tokens of each minibatch

    def __call__(self, samples: Samples, part: NDArray[np.int64]) -> Samples:
        """Returns the samples for a minibatch of the sequences ``part``. They have no advantages where no loss shall
        be, or weights of the KL to the old policy."""
        (places,) = torch.where(minibatch_token_mask(samples, part))
        if not len(places):
            return samples
        chosen = self._chosen(samples, places)
        self.shares.append(float(chosen.double().mean()))
        if self.algorithm.tokens.choose == "kl_cov":
            weights = torch.zeros_like(samples.advantages)
            weights[places[chosen]] = self.algorithm.parameters["kl_cov"]
            return replace(samples, old_kl_weights=weights)
        advantages = samples.advantages.clone()
        advantages[places[~chosen if self.algorithm.tokens.choose in _TRAINED else chosen]] = 0.0
        return replace(samples, advantages=advantages)

    def _chosen(self, samples: Samples, places: Tensor) -> Tensor:
        section, parameters = self.algorithm.tokens, self.algorithm.parameters
        if section.choose == "second_moment":
            gaps = (self.logprobs - samples.rollout_logprobs)[places]
            return second_moment_mask(gaps, threshold=parameters["second_moment"])
        if section.choose == "top_entropy":
            assert self.entropy is not None
            return top_entropy(self.entropy[places], section.share)
        values = covariances(self.logprobs[places], samples.advantages[places])
        if section.choose == "kl_cov":
            return top_share(values, section.share)
        between = parameters["covariance_low"], parameters["covariance_high"]
        return random_in_range(values, section.share, *between, self.generator)

    def row(self) -> Row:
        """Returns the share of tokens that were chosen, the mean over minibatches."""
        return {"tokens/chosen_fraction": sum(self.shares) / max(len(self.shares), 1)}


def token_choice(row: AlgorithmSection, found: ScoredSamples, seed: int) -> TokenChoice | None:
    """Returns the choice of ``row.tokens``, with the scores that were ``found``; None for all tokens."""
    if row.tokens.choose == "all":
        return None
    assert found.current is not None
    return TokenChoice(row, found.current, found.policy.get("entropy"), torch.Generator().manual_seed(seed))


@dataclass(slots=True, kw_only=True)
class PolicyUpdate:
    """The optimizer steps on rollout batches."""

    config: RunConfig
    roles: RunComponents
    attention_cost: float
    seconds_at_peak: Callable[[Iterable[int]], float] | None = None
    """Seconds at the GPUs' peak of training the policy on sequences of these lengths; None where that is not known."""
    training_flops: Callable[[Iterable[int]], float] | None = None
    """FLOPs of the same, for the metric flops/train; None: not counted."""
    tracked: Callable[[str], float] | None = None
    """The value of a prompt by its id, where the baseline is tracked."""
    state: AlgorithmState = field(init=False)
    packers: Packers = field(init=False)
    """Packers of the policy and of all roles with a layout of their own."""
    hooks: tuple[StepHooks, ...] = field(init=False)
    """The sides of active features."""
    policy_steps: OptimizerSteps = field(init=False)
    critic_steps: OptimizerSteps = field(init=False)

    def __post_init__(self) -> None:
        check_custom_objective(self.config.algorithm, cp=self.config.learner.dims.cp)
        check_custom_advantages(self.config.algorithm, self.config.rollout)
        check_custom_pair_loss(self.config.algorithm.preference)
        self.state = AlgorithmState()
        self.hooks = step_hooks(self.config, self.roles)
        unit = 2 if self.config.algorithm.pairs else 1  # neighboring sequences that are packed together
        self.packers = Packers(config=self.config, attention_cost=self.attention_cost, unit=unit)
        self.policy_steps, self.critic_steps = (OptimizerSteps(name=name) for name in ("policy", "critic"))

    @property
    def model_steps(self) -> tuple[OptimizerSteps, OptimizerSteps]:
        """The optimizer steps of each model."""
        return self.policy_steps, self.critic_steps

    async def __call__(self, groups: Sequence[RolloutGroup], step: int, watch: Stopwatch) -> Row:
        """Trains on a rollout batch. Returns its metrics. Makes no optimizer step if no token is left to train on:
        there is no group, no completion beats another, or all are left out."""
        row = await self._row(groups, step, watch)
        await self.free_step()
        return row

    async def _row(self, groups: Sequence[RolloutGroup], step: int, watch: Stopwatch) -> Row:
        section, longest = self.config.algorithm, self.config.max_sampled
        row: Row = {"tokens/train": 0}
        if not groups:
            return row
        groups = with_demonstrations(groups)
        rewards = shape_rewards(groups, section, self.state, max_new_tokens=longest)
        if section.pairs:
            groups, rewards = preference_pairs(groups, rewards)
        if not groups:
            return row
        found, samples, state = await self._scored(groups, rewards, step, watch)
        if not samples.mask.any():
            self.state = state
            return row | await to_thread(self._gaps, found)
        row |= await self._train(found, samples, step, watch, [group.prompt for group in groups])
        for hooks in self.hooks:
            row |= await hooks.trained(found, partial(self._score_now, found.samples, step, watch))
        self.state = state
        await to_thread(describe_kl, samples, section, row)
        return row

    async def free_step(self) -> None:
        """Frees the step's batch on ranks. Reward models hold none, and may be at work on later ones."""
        for model in (*self.roles.learners.values(), *self.roles.frozen_models.values()):
            await model.free_step()

    async def _scored(
        self, groups: Sequence[RolloutGroup], rewards: ShapedRewards, step: int, watch: Stopwatch
    ) -> tuple[ScoredSamples, Samples, AlgorithmState]:
        """Returns all scores of the groups, the samples to train on, and the algorithm's next state."""
        section = self.config.algorithm
        sampled = await to_thread(self._build_samples, groups)
        judges = await to_thread(self._judges, sampled, groups)
        said = await score_batch(self.config, self.roles, self.packers, sampled, step, watch, judges)

        def add_credit() -> tuple[ScoredSamples, Samples, AlgorithmState]:
            found = said
            for hooks in self.hooks:
                found = hooks.scored(found)
            samples, state = assign_credit(
                found.samples,
                groups,
                self._add_tracked_values(rewards, groups),
                section,
                success_reward=self.config.eval.success_reward,
                next_values=found.next_values,
                logit_norms=found.policy.get("logit_norms"),
            )
            samples = self._with_proximal_share(samples, groups, step)
            return found, samples, state

        return await to_thread(add_credit)

    def _add_tracked_values(self, rewards: ShapedRewards, groups: Sequence[RolloutGroup]) -> ShapedRewards:
        if self.tracked is None:
            return rewards
        return replace(rewards, tracked=torch.tensor([self.tracked(group.prompt.id) for group in groups]))

    def _described(self, found: ScoredSamples, samples: Samples, batches: Sequence[Batch]) -> Row:
        return self._gaps(found) | advantage_row(samples) | self.packers.own.metrics(batches)

    def _gaps(self, found: ScoredSamples) -> Row:
        """Returns metrics of the gap between engine and learner, and of features."""
        row = mismatch_row(found)
        for hooks in self.hooks:
            row |= hooks.described(found)
        return row

    def _build_samples(self, groups: Sequence[RolloutGroup]) -> Samples:
        """Returns samples of the groups, with the columns that models read. Raises DataError if a row lacks one that
        engines must return."""
        section, asked = self.config.algorithm, self.config.required_columns
        rows = [row for group in groups for one in group.trajectories for row in one.chains]
        for name, key in asked.items():
            if bare := sum(name not in row.columns for row in rows):
                raise DataError(
                    f"{key}, but {bare} of the step's {len(rows)} completions have no {name}: they were sampled before "
                    "it was set; continue without it until they are trained on, or start a new run"
                )
        samples = to_samples(
            groups,
            columns=asked,
            groups_of=section.aggregation == "prompt_mean" or self.config.train.minibatch_by_group,
            turns_of=section.ratio_level == "turn",
            demonstrated=section.demonstration_gamma is not None,
        )
        if section.pairs and samples.trajectory_of is not None:
            raise DataError("algorithm.preference.beta pairs completions of one row; these trajectories have several")
        for hooks in self.hooks:
            samples = hooks.sampled(samples)
        return samples

    def _judges(self, samples: Samples, groups: Sequence[RolloutGroup]) -> Judges | None:
        """Returns the judges that stand in for the reference, by the first feature that has some."""
        found = (hooks.judges(samples, groups) for hooks in self.hooks)
        return next((judges for judges in found if judges is not None), None)

    async def _score_now(
        self, samples: Samples, step: int, watch: Stopwatch, want: frozenset[Want]
    ) -> Mapping[Want, Tensor]:
        """Returns the policy's scores of the samples by now, [N, ...] each, by one more pass."""
        batch = await to_thread(self.packers.packed, samples, step)
        with watch("logprobs"):
            said = await self.roles.policy.score(batch, want)
        return {what: await to_thread(unpack, batch, scores, samples) for what, scores in said.items()}

    def _weighted(self, samples: Samples, part: NDArray[np.int64]) -> Samples:
        """Returns the samples with ``token_weight`` for a batch of the sequences ``part``, if it is needed."""
        section = self.config.algorithm
        weight = token_weight(
            samples,
            section.aggregation,
            max_length=self.config.max_sampled,
            part=torch.from_numpy(part),
        )
        return samples if weight is None else replace(samples, token_weight=weight)

    def _with_proximal_share(self, samples: Samples, groups: Sequence[RolloutGroup], step: int) -> Samples:
        """Adds the proximal weights: step s trains version s - 1, the proximal one, into version s."""
        if self.config.algorithm.old_logprobs != "interpolated":
            return samples
        versions = token_versions(groups, samples)
        return replace(samples, proximal_share=proximal_share(versions, proximal_version=step - 1, version=step))

    def _loss(self, limits: ClipLimits | None = None) -> Loss:
        """Returns the policy's loss under a minibatch's ``limits``."""
        own = {} if limits is None else {"clip_low": limits.low, "clip_high": limits.high}
        row = self.config.algorithm.model_copy(update=own)
        return policy_loss(row, kl_coefficient=row.kl.coefficient, max_new_tokens=self.config.max_sampled)

    async def _train(
        self, found: ScoredSamples, samples: Samples, step: int, watch: Stopwatch, prompts: Sequence[Prompt]
    ) -> Row:
        """Makes ``train.epochs`` passes over the batch, each in minibatches of a new order. The metrics of the batch
        are computed during these: ranks do not wait for them."""
        c = self.config
        choice = token_choice(c.algorithm, found, make_seed(c.seed, step, c.train.epochs))
        batches, own_columns = await to_thread(self._minibatches, samples, choice, step)
        row: Row = {"learning_rate": learning_rate(c, step)}
        described = asyncio.ensure_future(to_thread(self._described, found, samples, batches))
        try:
            policy_steps, critic_steps = await self._steps(batches, own_columns, step, watch, prompts, row)
        finally:
            await asyncio.wait([described])
        row = described.result() | row | ({} if choice is None else choice.row())
        row["steps/skipped"] = [*policy_steps, *critic_steps].count(None)
        row |= policy_row([made for made in policy_steps if made is not None])
        if c.algorithm.old_kl_limit is not None:
            row["steps/completed"] = len(policy_steps) - policy_steps.count(None)
        learned = [made for made in critic_steps if made is not None]
        if learned or c.algorithm.is_own_critic:
            row["critic/explained_variance"] = await to_thread(explained_variance, samples)
        if learned:
            row |= critic_row(learned)
        return row

    async def _limits(self, batch: Batch, watch: Stopwatch) -> ClipLimits | None:
        """Returns a minibatch's limits of ratios, by the first feature that has some."""
        for hooks in self.hooks:
            if (limits := await hooks.limits(batch, watch)) is not None:
                return limits
        return None

    def _minibatches(
        self, samples: Samples, choice: TokenChoice | None, step: int
    ) -> tuple[list[Batch], Callable[[Batch], Batch]]:
        """Returns the minibatches of a step that have a token to train on: of others, momentum would move the weights.
        They share columns. The function gives one its own, in their order, so that those of one are held at a time."""
        train = self.config.train
        seeds = [make_seed(self.config.seed, step, epoch) for epoch in range(train.epochs)]

        def columns_for(samples: Samples, part: NDArray[np.int64]) -> Samples:
            return self._weighted(samples if choice is None else choice(samples, part), part)

        packed = self.packers.own.minibatches(samples, limit=train.minibatches, seeds=seeds)
        return [batch for batch in packed if batch.num_tokens], partial(finish_minibatch, weighted=columns_for)

    async def _steps(
        self,
        batches: Sequence[Batch],
        own_columns: Callable[[Batch], Batch],
        step: int,
        watch: Stopwatch,
        prompts: Sequence[Prompt],
        row: Row,
    ) -> tuple[list[CompletedStep | None], list[CompletedStep | None]]:
        """Makes the optimizer steps of policy and critic; of each, None if it was skipped.

        The policy stops at the minibatch at which it is further from the old one than ``algorithm.old_kl_limit``. A
        critic that is a second model makes all steps. Writes the work done, and where the policy ended, into the
        row.
        """
        section, roles = self.config.algorithm, self.roles
        rate, critic_rate = learning_rate(self.config, step), critic_learning_rate(self.config, step)
        value_loss, critic = ValueLoss(clip=section.critic.clip), roles.learners.get("critic")
        policy_steps: list[CompletedStep | None] = []
        critic_steps: list[CompletedStep | None] = []
        goes_on = critic is None or step > section.critic.only_steps
        for number, planned in enumerate(batches):
            if not goes_on and critic is None:
                break
            batch = await to_thread(own_columns, planned)
            limits = await self._limits(batch, watch) if goes_on else None
            loss = self._loss(limits)
            async with RankTasks(watch) as at_once:
                trained = valued = None
                if goes_on:
                    near = partial(self.policy_steps.step_near, max_kl=section.old_kl_limit)
                    trained = at_once.start("train", near(roles.policy, batch, loss, rate, prompts))
                if critic is not None:
                    learned = await to_thread(self.packers.repack, "critic", batch)
                    learned = for_pass(learned, replays=False, last_tokens=False)
                    asked = self.critic_steps.step(critic, learned, value_loss, critic_rate, prompts)
                    valued = at_once.start("critic", asked)
                if trained is not None:
                    made = await at_once.end(trained)
                    self._count_work(batch, row, watch)
                    if isinstance(made, KLLimitReached):
                        goes_on = False
                        row |= {"kl/stopped_at": made.kl, **self.packers.own.metrics(batches[: number + 1])}
                    elif made is None or limits is None:
                        policy_steps.append(made)
                    else:
                        policy_steps.append(replace(made, loss_metrics={**made.loss_metrics, **limits.metrics}))
                if valued is not None:
                    critic_steps.append(await at_once.end(valued))
        return policy_steps, critic_steps

    def _count_work(self, batch: Batch, row: Row, watch: Stopwatch) -> None:
        """Adds the work of training on the batch to flops/train and to the phase's seconds at the GPUs' peak."""
        if self.training_flops is not None:
            row["flops/train"] = float(row.get("flops/train") or 0) + self.training_flops(_positions(batch))
        if self.seconds_at_peak is not None:
            watch.add_peak_seconds(self.seconds_at_peak(_positions(batch)))


def _positions(batch: Batch) -> list[int]:
    """Returns the positions of every sequence that ranks compute."""
    return [n for row in computed_lengths(batch) for lengths in row for n in lengths.tolist()]


def mismatch_row(found: ScoredSamples) -> Row:
    """Returns metrics of the gap between engine and learner; empty if no log-probs are needed before training."""
    samples, current = found.samples, found.current
    if current is None:
        return {}
    sampled = samples.mask if samples.demonstrated is None else samples.mask & ~samples.demonstrated
    return {**mismatch_metrics(current, samples.rollout_logprobs, sampled, samples.cu_seqlens)}


def advantage_row(samples: Samples) -> Row:
    """Returns mean and standard deviation over the trained tokens."""
    trained = samples.advantages.numpy()[samples.mask.numpy()]
    return {
        "advantage/mean": float(trained.mean(dtype=np.float64)),
        "advantage/std": float(trained.std(dtype=np.float64)),
    }


def explained_variance(samples: Samples) -> float:
    """1 - Var(returns - values)/Var(returns) over trained tokens: 1 is a perfect critic; 0 if all returns are equal."""
    assert samples.returns is not None
    assert samples.old_values is not None
    returns, values = (x[samples.mask].double() for x in (samples.returns, samples.old_values))
    if not differ(returns, torch.zeros_like(returns, dtype=torch.int64)).any():
        return 0.0
    return 1 - float((returns - values).var(correction=0)) / float(returns.var(correction=0))


def token_versions(groups: Sequence[RolloutGroup], samples: Samples) -> Tensor:
    """Returns the version that sampled each target, [N] int64, by its turn's spans; for others, that of the first."""
    rows = [row for group in groups for one in group.trajectories for row in one.chains]
    versions = torch.empty(len(samples.targets), dtype=torch.int64)
    for row, (first, stop) in zip(rows, pairwise(samples.cu_seqlens.tolist()), strict=True):
        versions[first:stop] = row.turns[0].spans[0].version
        for turn in row.turns:
            begin, end = first + turn.start - 1, first + turn.stop - 1  # positions; their targets are one further
            for span in turn.spans:  # a later one covers what is after its start
                versions[begin + span.start : end] = span.version
    return versions
