"""Reinforcement learning: samples completions of the policy, rewards them, trains on them and pushes the weights."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rl_megatron.agents.source import environment_row
from rl_megatron.config.beside import frozen_folders
from rl_megatron.config.run import RunConfig
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.errors import DataError
from rl_megatron.files import remove_folder
from rl_megatron.interfaces import Learner, RunComponents
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.rollout.stream import (
    NO_GRADIENT_REASONS,
    GroupSource,
    Ledger,
    PendingPrompt,
    Reason,
    RolloutBatch,
    RolloutStream,
)
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.credit import groups_with_gradient, trainable_groups
from rl_megatron.training.evaluation import BackgroundEvaluator, Evaluator
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import RolloutGroup

logger = logging.getLogger(__name__)

_FOLDERS = {"policy": "learner"}  # a checkpoint's folder by role; others are named as their role
_LEFT_OUT: Mapping[Reason, str] = {
    "equal_rewards": "equal rewards",
    "zero_advantages": "advantages of 0",
    "poison": "servers that ended under them",
    "reward_error": "failed rewards",
    "environment_error": "failed trajectories",
    "long_prompt": "prompts that are too long",
    "nothing_sampled": "trajectories without a sampled turn",
}


def make_stream(config: RunConfig, prompts: PromptStream, source: GroupSource, ledger: Ledger) -> RolloutStream:
    """Returns the stream of a run's groups."""
    limit = config.max_sampled
    return RolloutStream(
        prompts=prompts,
        source=source,
        section=config.rollout,
        max_staleness=config.train.max_staleness,
        last_step=config.train.steps,
        teaches=partial(trainable_groups, section=config.algorithm, max_new_tokens=limit),
        untaught="zero_advantages" if config.algorithm.own_decides else "equal_rewards",
        ledger=ledger,
    )


@dataclass(slots=True, kw_only=True)
class RLJob:
    """The Job of ``training.loop`` whose steps take a batch of groups from the stream, train the policy on it and push
    its weights."""

    config: RunConfig
    roles: RunComponents
    prompts: PromptStream
    stream: RolloutStream  # gives groups, also those that are sampled ahead
    evaluation: Evaluator
    update: PolicyUpdate
    start_folder: Path  # the policy is exported here at the start, if a reference or a critic starts from it
    recorder: Recorder
    push_route: str  # name of how pushes travel, in rows of metrics
    name: str = "reinforcement"
    background_eval: BackgroundEvaluator | None = None  # evaluates while later steps train, with `eval.mode=background`
    number: int = 0  # number of the last step
    last_placements: tuple[PendingPrompt, ...] = ()  # prompts of the last batch

    @property
    def first_step_is_saved(self) -> bool:
        """True if a warm start came before this job."""
        return self.config.warm_start.steps > 0

    async def start(self, *, fresh: bool) -> Row | None:
        """Loads the weights of reference and critic.

        Where servers take turns with the learner, they have left their GPUs to the models that were loaded, and the
        policy's weights are pushed again.
        """
        await asyncio.to_thread(self.prompts.read_ahead)
        if fresh:
            await asyncio.to_thread(self.stream.restart)
        loaded = await self.start_models(fresh=fresh)
        if loaded and self.config.rollout.server.colocated:
            await self.roles.weight_sync.push(self.number)
        return {"step": 0, "phase": "rl"} if fresh else None

    async def start_models(self, *, fresh: bool) -> bool:
        """Loads the weights of frozen models. On a fresh start it loads those of a critic and of a reference that
        follows the policy, too, which a checkpoint restores itself.

        Returns whether there was anything to load.
        """
        roles, critic = self.roles, self.config.algorithm.critic
        wanted = (
            self.config.needs_reference and self.config.reference is None,
            "critic" in roles.learners and critic.path is None,
        )
        if fresh and any(wanted):
            remove_folder(self.start_folder)  # left by a run that was killed before its first checkpoint
            await roles.weight_sync.export(self.start_folder)
        if fresh and "critic" in roles.learners:
            await roles.learners["critic"].load_weights(critic.path or self.start_folder)
        frozen = {
            role: folder for role, (folder, _) in frozen_folders(self.config).items() if role in roles.frozen_models
        }
        if not fresh and self.config.reference_moves:
            del frozen["reference"]  # it is in the checkpoint
        for role, folder in frozen.items():
            await roles.frozen_models[role].load_weights(folder or self.start_folder)
        return bool(frozen) or (fresh and "critic" in roles.learners)

    async def step(self, number: int, watch: Stopwatch) -> Row:
        """Takes a batch, trains on it and pushes the weights. Returns the metrics row."""
        self.number = number
        if self.background_eval is not None:
            self.background_eval.check()
        row = await self._train(watch)
        for hooks in self.update.hooks:
            await hooks.stepped(number, watch)
        if not row["tokens/train"]:
            logger.warning("step %d has no token to train on and is skipped: the weights do not change", number)
        with watch("rollout"):
            await self.stream.wait_until_pushable()
        row |= self._update_table()  # follows all draws before a push, so that draws depend on steps alone
        with watch("weights"):
            pushed = await self.roles.weight_sync.push(number)
        self.stream.on_push(number)
        row |= self.stream.row()
        watch.count("rollout", int(row["tokens/rollout"] or 0), in_background=self.config.train.max_staleness > 0)
        watch.count("train", int(row["tokens/train"] or 0))
        row |= {"weights/bytes": pushed.num_bytes, "weights/route": self.push_route}
        row["seconds/verify"] = pushed.verify_seconds
        if pushed.quantization_error is not None:
            row["weights/quantization_error"] = pushed.quantization_error
        row |= self.roles.engine_metrics()
        return {**row, **self.roles.rank_metrics()}

    async def _train(self, watch: Stopwatch) -> Row:
        """Trains on the step's batch. Returns its metrics."""
        with watch("rollout"):
            batch = await self.next_batch()
        self.last_placements, epochs = (
            batch.places,
            self.prompts.epochs(),
        )  # now: groups that end meanwhile have more drawn
        row = await asyncio.to_thread(self._described, batch, epochs)  # it visits every token, and writes to a disk
        return row | await self.update(batch.groups, self.number, watch)

    def _described(self, batch: RolloutBatch, epochs: Mapping[str, float]) -> Row:
        """Records samples of the batch. Returns its metrics."""
        self.recorder.write_samples(self.number, batch.groups)
        row = rollout_row(self.config, self.number, batch, epochs)
        for hooks in self.update.hooks if batch.groups else ():
            row |= hooks.group_row(batch.groups)
        return row

    async def next_batch(self) -> RolloutBatch:
        """Returns the next batch, after dynamic sampling; short or empty if too many groups would give no gradient."""
        section = self.config.rollout
        wanted = section.prompts_per_step if section.dynamic_sampling == "refill" else 1
        batch = await self.stream.take(self.number)
        if len(batch.groups) >= wanted:
            return batch
        reasons = Counter(one.answered.reason for one in batch.places if one.answered is not None)
        left_out = {reason: reasons[reason] for reason in _LEFT_OUT if reasons[reason]}
        found = (
            f"step {self.number}: {len(batch.groups) + sum(left_out.values())} prompts left {len(batch.groups)} groups "
            f"to train on, {wanted} were wanted; left out (log.txt names those that failed): "
            + ", ".join(f"{count} for {_LEFT_OUT[reason]}" for reason, count in left_out.items())
        )
        if not batch.groups and not left_out.keys() & NO_GRADIENT_REASONS and left_out.keys() != {"poison"}:
            problems = (one.answered.problem for one in batch.places if one.answered is not None)
            first = next((f"; the first of them: {problem}" for problem in problems if problem), "")
            raise DataError(f"{found}. Fix these, or the data{first}")
        logger.warning("%s; the step trains on these", found)
        return batch

    def _update_table(self) -> Row:
        """Adds the results of the step's prompts to the table of pass rates. Returns metrics ``curriculum/…``."""
        table, right = self.prompts.table, self.config.eval.success_reward
        if table is None:
            return {}
        seen = [
            (one.drawn.prompt.id, one.answered.rewards)
            for one in sorted(self.last_placements, key=lambda place: place.drawn.ordinal)
            if one.answered is not None
            and one.answered.rewards
            and (one.is_trainable or one.answered.reason in NO_GRADIENT_REASONS)
        ]
        shares = [(name, float(np.mean([reward >= right for reward in rewards]))) for name, rewards in seen]
        table.update(shares, self.number, self.prompts.left_out)
        table.track(seen)
        return dict(table.row())

    async def evaluate(self, watch: Stopwatch) -> Row:
        """Returns figures of the sets that are due, of the weights that were pushed last, timed as ``eval``.

        With ``eval.mode=background`` it returns figures before the first step and after the last one alone; other
        evaluations end later.
        """
        if self.background_eval is not None and 0 < self.number < self.config.train.steps:
            self.background_eval.begin(self.number)
            return {}
        with watch("eval"):
            if self.background_eval is not None:
                await self.background_eval.finish(self.number)
            return await self.evaluation.row(self.number)

    def should_stop(self, row: Row) -> bool:
        """Always False: the job makes all its steps."""
        return False

    def learners(self) -> dict[str, Learner]:
        """Returns the learners with shards in a checkpoint, keyed by subfolder."""
        return {_FOLDERS.get(role, role): learner for role, learner in self.roles.learners.items()}

    async def flush(self, stop: asyncio.Event) -> None:
        """Makes ``state`` include the tokens of groups that are being sampled. Waits for an evaluation of an earlier
        step, with weights that are not in this checkpoint, unless ``stop`` is set."""
        if self.background_eval is not None:
            await self.background_eval.finish(self.number, stop)
        await self.stream.collect_partials()

    def state(self) -> TrainerState:
        """Returns the position in the data, what was drawn and is not trained on yet, and the algorithm's state."""
        return TrainerState(
            step=self.number,
            prompts=self.prompts.state(),
            left_out=tuple(sorted(self.prompts.left_out)),
            stream=self.stream.state(),
            memory=self.update.state,
            skipped={one.name: one.skipped_in_a_row for one in self.update.model_steps},
            table=None if self.prompts.table is None else self.prompts.table.state(),
        )

    async def close(self) -> None:
        """Ends the sampling of groups, and a running evaluation; waits until their environments are closed."""
        if self.background_eval is not None:
            await self.background_eval.close()
        await self.stream.close()
        await self.evaluation.wait_closed()

    async def restore(self, state: TrainerState) -> None:
        """Continues from ``state``, and pushes the weights."""
        self.number = state.step
        await asyncio.to_thread(self.prompts.digest)
        self.prompts.restore(state.prompts, state.left_out)
        if self.prompts.table is not None:
            self.prompts.table.restore(state.table)
        if state.stream is not None:
            await asyncio.to_thread(self.stream.restore, state.stream)  # reads all of the ledger
        if state.memory is not None:
            self.update.state = state.memory
            for one in self.update.model_steps:
                one.skipped_in_a_row = state.skipped.get(one.name, 0)
        await self.roles.weight_sync.push(self.number)
        if (
            self.background_eval is not None
            and 0 < self.number < self.config.train.steps
            and self.evaluation.due(self.number)
        ):
            self.background_eval.begin(self.number)


def rollout_row(config: RunConfig, step: int, rollouts: RolloutBatch, epochs: Mapping[str, float]) -> Row:
    """Returns all metrics of the batch of a step; ``epochs`` are those of the sources of a mixture, by name."""
    return {
        "step": step,
        "phase": "rl",
        "reward/errors": rollouts.reward_errors,
        "reward/timeouts": rollouts.timed_out_rewards,
        "reward/sampled_mean": rollouts.reward_sum / max(1, rollouts.num_completions),
        **rollouts.part_means(),
        "groups/trained": len(rollouts.groups),
        "groups/dropped": rollouts.dropped_groups,
        "groups/filtered": rollouts.filtered_groups,
        **_correct_row(rollouts, config.eval.success_reward),
        "tokens/rollout": rollouts.num_tokens,
        **(_group_row(config, step, rollouts.groups) if rollouts.groups else {}),
        **source_row(config, rollouts, epochs),
    }


def _correct_row(rollouts: RolloutBatch, success_reward: float) -> Row:
    """Returns the shares of sampled groups, also filtered ones, in which all completions or none are correct."""
    sampled = [one.answered.rewards for one in rollouts.places if one.answered is not None and one.answered.rewards]
    shares = np.array([np.mean(np.array(rewards) >= success_reward) for rewards in sampled])
    if not sampled:
        return {}
    return {"groups/all_correct": float(np.mean(shares == 1)), "groups/none_correct": float(np.mean(shares == 0))}


def _group_row(config: RunConfig, step: int, groups: Sequence[RolloutGroup]) -> Row:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([one.reward for one in trajectories])
    lengths = np.array([one.num_sampled for one in trajectories])
    staleness = step - 1 - np.array([one.turns[0].spans[0].version for one in trajectories])
    aged = config.train.max_staleness > 0
    cut = [one.stop == "length" for one in trajectories]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups/zero_advantage_fraction": float(np.mean(np.logical_not(_teaches(config, groups)))),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": int(lengths.max()),
        "response/truncated_fraction": float(np.mean(cut)),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": int(staleness.max()),
        **(environment_row(led) if (led := [one for one in trajectories if one.metrics]) else {}),
        **_demonstration_row(groups),
        **{f"staleness/share/v{age}": float(np.mean(staleness == age)) for age in range(staleness.max() + 1) if aged},
    }


def _demonstration_row(groups: Sequence[RolloutGroup]) -> Row:
    rewards = [reward for group in groups if group.demonstration is not None for reward in group.demonstration.rewards]
    return {"demonstration/reward": float(np.mean(rewards))} if rewards else {}


def source_row(config: RunConfig, rollouts: RolloutBatch, epochs: Mapping[str, float]) -> Row:
    """Returns metrics ``source/<name>/…`` of a mixture; rewards are absent where a step has none of them."""
    row = Row()
    teach = dict(zip(map(id, rollouts.groups), _teaches(config, rollouts.groups), strict=True)) if epochs else {}
    for name, passed in epochs.items():
        groups = [group for group in rollouts.groups if group.prompt.source == name]
        found = {"share": len(groups) / max(1, len(rollouts.groups)), "epoch": passed}
        if groups:
            found["reward"] = float(np.mean([one.reward for group in groups for one in group.trajectories]))
            found["zero_advantage"] = float(np.mean([not teach[id(group)] for group in groups]))
        row |= {f"source/{name}/{key}": value for key, value in found.items()}
    return row


def _teaches(config: RunConfig, groups: Sequence[RolloutGroup]) -> list[bool]:
    """Marks groups that have different rewards, and so a gradient."""
    return groups_with_gradient(groups, config.algorithm, max_new_tokens=config.max_sampled)
