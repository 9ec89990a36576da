"""READ FIRST. The loop and one step: sample, score, pack, train, push weights. One controller, whatever lies behind.

Synchronous is asynchronous with ``train.max_staleness=0``: with s > 0 the next batch is sampled while this one is
trained on, and up to s sampled batches wait. Everything random is a function of (seed, step), so a resumed run
repeats a run that was never interrupted, to the bit.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl_megatron.checkpoints import CheckpointStore, TrainerState
from rl_megatron.config import RunConfig
from rl_megatron.credit import limit_second_moment, make_samples, masked_in
from rl_megatron.data.packing import pack, packing_metrics
from rl_megatron.data.prompts import PromptStream
from rl_megatron.data.samples import split_minibatches
from rl_megatron.errors import DataError
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Recorder, Stopwatch
from rl_megatron.rollout.sampler import RolloutBatch, RolloutSampler
from rl_megatron.types import Batch, Loss, Prompt, RolloutGroup, StepResult

Row = dict[str, int | float | str | None]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One run's loop. ``stop`` set (Ctrl-C, SIGTERM) ends it after the step in hand, with a checkpoint."""

    config: RunConfig
    roles: Roles
    sampler: RolloutSampler
    prompts: PromptStream
    eval_prompts: Sequence[Prompt]
    policy_loss: Loss
    attention_cost: float
    checkpoints: CheckpointStore
    recorder: Recorder
    stop: asyncio.Event
    step: int = 0
    batches_sampled: int = 0
    buffer: deque[RolloutBatch] = field(default_factory=deque)
    saved: int | None = None  # step of the checkpoint that was written or restored last

    async def run(self) -> None:
        """Train from ``self.step`` to ``train.steps``, or to a stop; the last step is saved, the end is evaluated."""
        if self.saved is None:
            self.recorder.write({"step": 0, "phase": "rl", **await self.evaluate()})
            await self.save()
        watch = Stopwatch()
        while self.step < self.config.train.steps and not self.stop.is_set():
            row = await self.train_once(watch)
            if self._due(self.config.eval.every):
                with watch("eval"):
                    row |= await self.evaluate()
            self.recorder.write(row | watch.row())  # before the checkpoint: a resume keeps rows up to its step
            watch = Stopwatch()
            if self._due(self.config.checkpoint.every):
                with watch("checkpoint"):
                    await self.save()
        if self.saved != self.step:  # stopped between checkpoints
            await self.save()

    def _due(self, every: int) -> bool:
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    async def train_once(self, watch: Stopwatch) -> Row:
        """One step: the metrics row of a rollout batch sampled, trained on and pushed."""
        staleness = self.config.train.max_staleness
        while len(self.buffer) < max(1, staleness):
            with watch("rollout"):
                self.buffer.append(await self.sample())
        rollouts = self.buffer.popleft()
        self.step += 1
        ahead = asyncio.ensure_future(self.sample()) if len(self.buffer) < staleness else None
        try:
            row = self.describe(rollouts) | await self.update(rollouts, watch)
            if ahead is not None:
                with watch("rollout"):
                    self.buffer.append(await ahead)
        except BaseException:
            if ahead is not None:
                ahead.cancel()
                await asyncio.wait([ahead])
            raise
        with watch("weights"):
            pushed = await self.roles.weights.push(self.step)
        watch.count("rollout", int(row["tokens/rollout"] or 0))
        watch.count("train", int(row["tokens/train"] or 0))
        return row | {"weights/bytes": pushed.num_bytes}

    async def update(self, rollouts: RolloutBatch, watch: Stopwatch) -> Row:
        """The optimizer steps on a rollout batch, and their metrics."""
        batches = self.make_batches(rollouts.groups)
        row: Row = {**packing_metrics(batches, dims=self.config.learner.dims, attention_cost=self.attention_cost)}
        section = self.config.algorithm
        if section.old_logprobs == "learner" or section.second_moment_limit is not None:
            with watch("logprobs"):
                current = [await self.roles.learner.compute_logprobs(batch) for batch in batches]
            if section.second_moment_limit is not None:
                batches = limit_second_moment(batches, current, section.second_moment_limit)
                row["correction/dropped_fraction"] = 1 - masked_in(batches) / masked_in(current)
            else:
                batches = current
        rate = learning_rate(self.config, self.step)
        with watch("train"):
            results = [await self.roles.learner.train_step(b, self.policy_loss, rate) for b in batches]
        return row | {"learning_rate": rate} | combine(results)

    async def sample(self) -> RolloutBatch:
        """The next rollout batch to train on, dynamic sampling done. Raises DataError when too little is left of it."""
        section = self.config.rollout
        tries, wanted, informative = {
            "off": (1, 1, False),
            "drop": (section.max_refills, 1, True),
            "refill": (section.max_refills, section.prompts_per_step, True),
        }[section.dynamic_sampling]
        batch = RolloutBatch()
        for _ in range(tries):
            self.batches_sampled += 1
            prompts = self.prompts.take(section.prompts_per_step)
            sampled = await self.sampler.sample(prompts, step=self.batches_sampled)
            batch = batch.joined(sampled.informative() if informative else sampled)
            if len(batch.groups) >= wanted:
                return batch.cut(section.prompts_per_step)
        raise DataError(
            f"rollout batch {self.batches_sampled}: {tries} x {section.prompts_per_step} prompts left "
            f"{len(batch.groups)} groups to train on, {wanted} needed: {batch.dropped_groups} were dropped for their "
            f"reward (log.txt names them), {batch.filtered_groups} had equal rewards. Mend the reward or the data, or "
            "set rollout.dynamic_sampling=off"
        )

    def make_batches(self, groups: Sequence[RolloutGroup]) -> list[Batch]:
        """Advantages over the whole rollout batch, then ``train.minibatches`` packed batches in a fresh order."""
        c = self.config
        samples = make_samples(groups, c.algorithm, max_new_tokens=c.rollout.max_new_tokens)
        parts = split_minibatches(samples, min(c.train.minibatches, samples.num_sequences), seed_of(c.seed, self.step))
        return [
            pack(
                part,
                dims=c.learner.dims,
                max_tokens=c.learner.max_tokens_per_micro_batch,
                attention_cost=self.attention_cost,
            )
            for part in parts
        ]

    def describe(self, rollouts: RolloutBatch) -> Row:
        """What can be said of a rollout batch before training on it; also records sample completions."""
        groups = rollouts.groups
        self.recorder.write_samples(self.step, groups)
        rewards = np.array([r for g in groups for r in g.rewards])
        completions = [c for g in groups for c in g.completions]
        lengths = np.array([len(c.token_ids) for c in completions])
        staleness = self.step - 1 - np.array([c.versions[0] for c in completions])
        return {
            "step": self.step,
            "phase": "rl",
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/errors": rollouts.reward_errors,
            "reward/sampled_mean": rollouts.reward_sum / max(1, rollouts.num_completions),
            **rollouts.part_means(),
            "groups/dropped": rollouts.dropped_groups,
            "groups/filtered": rollouts.filtered_groups,
            "groups/zero_advantage_fraction": float(np.mean([len(set(g.rewards)) == 1 for g in groups])),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": int(lengths.max()),
            "response/truncated_fraction": float(np.mean([c.finish_reason == "length" for c in completions])),
            "staleness/mean": float(staleness.mean()),
            "staleness/max": int(staleness.max()),
            "tokens/rollout": int(lengths.sum()),
        }

    async def evaluate(self) -> Row:
        """Held-out accuracy of the weights pushed last."""
        section = self.config.eval
        accuracy = await self.sampler.evaluate(
            self.eval_prompts, temperature=section.temperature, success_reward=section.success_reward
        )
        return {"eval/accuracy": accuracy}

    async def save(self) -> None:
        """A checkpoint of this moment: learner, data position and waiting rollouts."""
        state = TrainerState(
            step=self.step,
            batches_sampled=self.batches_sampled,
            prompts=self.prompts.state(),
            buffer=tuple(self.buffer),
        )
        await self.checkpoints.save(state, self.roles.learner)
        self.saved = self.step

    async def restore(self, state: TrainerState, folder: Path) -> None:
        """Continue from a checkpoint: the learner's shards, the position in the data, and its weights pushed."""
        await self.roles.learner.load(folder / "learner")
        self.step, self.batches_sampled = state.step, state.batches_sampled
        self.prompts.restore(state.prompts)
        self.buffer = deque(state.buffer)
        self.saved = self.step
        await self.roles.weights.push(self.step)


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of RL step ``step`` (from 1): linear warm-up, then constant, linear or cosine decay to 0."""
    train = config.train
    warm = min(1.0, step / train.lr_warmup_steps) if train.lr_warmup_steps else 1.0
    left = (train.steps - step + 1) / max(1, train.steps - train.lr_warmup_steps)
    shapes = {"none": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * min(1.0, left))}
    return train.learning_rate * min(warm, shapes[train.lr_decay])


def seed_of(*parts: int) -> int:
    """One 63-bit seed from several numbers, unlike for unlike parts."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def combine(results: Sequence[StepResult]) -> Row:
    """The step's metrics: means over its optimizer steps, and the extremes of minima and maxima."""
    rows = [{"loss": r.loss, "grad_norm": r.grad_norm, **r.metrics} for r in results]
    over = {"min": min, "max": max}
    return {name: over.get(name[-3:], _mean)([row[name] for row in rows]) for name in rows[0]}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
