"""READ FIRST. The loop and one step: sample, score, pack, train, push weights. One controller, whatever lies behind.

Synchronous is asynchronous with ``train.max_staleness=0``: with s > 0 the next batch is sampled while this one is
trained on, and up to s sampled batches wait. Everything random is a function of (seed, step), so a resumed run
repeats a run that was never interrupted, to the bit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl_megatron.config.run import RunConfig
from rl_megatron.data.prompts import PromptStream
from rl_megatron.durable import remove_folder
from rl_megatron.errors import DataError, Stopped
from rl_megatron.interfaces import Learner, Roles
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.rollout.batch import RolloutBatch, RolloutSource
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.training.checkpoints import Checkpoint, CheckpointStore, TrainerState, files_of
from rl_megatron.training.credit import groups_that_differ
from rl_megatron.training.stopping import unless_stopped
from rl_megatron.training.update import Update
from rl_megatron.types import Prompt, RolloutGroup

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One run's loop. ``stop`` set (Ctrl-C, SIGTERM) ends it after the step in hand, with a checkpoint."""

    config: RunConfig
    roles: Roles
    source: RolloutSource
    sampler: RolloutSampler
    prompts: PromptStream
    eval_prompts: Sequence[Prompt]
    update: Update
    start_folder: Path  # keeps the policy that reinforcement starts from, where a reference or a critic starts from it
    checkpoints: CheckpointStore
    recorder: Recorder
    stop: asyncio.Event
    step: int = 0
    batches_sampled: int = 0
    buffer: deque[RolloutBatch] = field(default_factory=deque)
    saved: int | None = None  # the step that a resume goes on from; None before the first

    async def run(self) -> None:
        """Train from ``self.step`` to ``train.steps``, or to a stop; the last step is saved, the end is evaluated.

        Raises Stopped where a stop is asked before the first step.
        """
        warm = self.saved is None and self.config.warm_start.steps > 0  # its weights are in no checkpoint yet
        await (self._start() if warm else unless_stopped(self.stop, self._start()))
        if self.stop.is_set():
            raise Stopped("stopped before the first step of reinforcement")
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

    async def _start(self) -> None:
        await self._start_models()
        if self.saved is None:
            self.recorder.write({"step": 0, "phase": "rl", **await self.evaluate()})
            if self.config.warm_start.steps:
                await self.save()
            self.saved = self.step  # without a warm start, a resume makes the start again: there is nothing to keep

    async def _start_models(self) -> None:
        """The reference takes its weights; so does the critic, unless a checkpoint gave it its own."""
        roles, kl, critic = self.roles, self.config.algorithm.kl, self.config.algorithm.critic
        fresh = self.saved is None
        wanted = (
            roles.reference is not None and kl.reference is None,
            roles.critic is not None and critic.path is None,
        )
        if fresh and any(wanted):
            remove_folder(self.start_folder)  # of a run that was killed before its first checkpoint
            await roles.weights.export(self.start_folder)
        if fresh and roles.critic is not None:
            path = critic.path or self.start_folder
            trained = not (path / "config.json").is_file()  # shards of a critic, not a model to start from
            await (roles.critic.load(path, files_of(path)) if trained else roles.critic.start_from(path))
        if roles.reference is not None:
            await roles.reference.start_from(kl.reference or self.start_folder)

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
            row = self.describe(rollouts) | await self.update(rollouts.groups, self.step, watch)
            if not row["tokens/train"]:
                logger.warning("step %d has no token to train on, and is skipped: weights stay as they are", self.step)
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
        row |= {"weights/bytes": pushed.num_bytes, "seconds/verify": pushed.verify_seconds}
        if pushed.quantization_error is not None:
            row["weights/quantization_error"] = pushed.quantization_error
        return {**row, **self.roles.engine_metrics()}

    async def sample(self) -> RolloutBatch:
        """The next rollout batch to train on, dynamic sampling done. It may be short, or empty where rewards are equal.

        Raises DataError where rewards that failed left nothing of it.
        """
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
            sampled = await self.source.sample(prompts, step=self.batches_sampled)
            batch = batch.joined(sampled.filtered(self._teaches(sampled.groups)) if informative else sampled)
            if len(batch.groups) >= wanted:
                return batch.cut(section.prompts_per_step)
        found = (
            f"rollout batch {self.batches_sampled}: {tries} x {section.prompts_per_step} prompts left "
            f"{len(batch.groups)} groups to train on, {wanted} were wanted: {batch.dropped_groups} were dropped for "
            f"their reward (log.txt names them), {batch.filtered_groups} had equal rewards"
        )
        if not batch.groups and not batch.filtered_groups:
            raise DataError(f"{found}. Mend the reward or the data")
        logger.warning("%s; the step trains on what there is", found)
        return batch

    def _teaches(self, groups: Sequence[RolloutGroup]) -> list[bool]:
        """Of each group."""
        c = self.config
        return groups_that_differ(groups, c.algorithm, max_new_tokens=c.rollout.max_new_tokens)

    def describe(self, rollouts: RolloutBatch) -> Row:
        """What can be said of a rollout batch before training on it; also records sample completions."""
        self.recorder.write_samples(self.step, rollouts.groups)
        return {
            "step": self.step,
            "phase": "rl",
            "reward/errors": rollouts.reward_errors,
            "reward/sampled_mean": rollouts.reward_sum / max(1, rollouts.num_completions),
            **rollouts.part_means(),
            "groups/trained": len(rollouts.groups),
            "groups/dropped": rollouts.dropped_groups,
            "groups/filtered": rollouts.filtered_groups,
            "tokens/rollout": 0,
            **(self._describe_groups(rollouts.groups) if rollouts.groups else {}),
        }

    def _describe_groups(self, groups: Sequence[RolloutGroup]) -> Row:
        rewards = np.array([r for g in groups for r in g.rewards])
        completions = [c for g in groups for c in g.completions]
        lengths = np.array([len(c.token_ids) for c in completions])
        staleness = self.step - 1 - np.array([c.versions[0] for c in completions])
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "groups/zero_advantage_fraction": float(np.mean(np.logical_not(self._teaches(groups)))),
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
            memory=self.update.memory,
        )
        await self.checkpoints.save(state, self._learners())
        self.saved = self.step

    def _learners(self) -> dict[str, Learner]:
        critic = self.roles.critic
        return {"learner": self.roles.learner, **({"critic": critic} if critic is not None else {})}

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: the learners' shards, the position in the data, and the weights pushed."""
        await checkpoint.load(self._learners())
        state = checkpoint.state
        self.step, self.batches_sampled = state.step, state.batches_sampled
        self.prompts.restore(state.prompts)
        self.buffer = deque(state.buffer)
        if state.memory is not None:
            self.update.memory = state.memory
        self.saved = self.step
        await self.roles.weights.push(self.step)
