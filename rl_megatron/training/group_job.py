"""The base class of jobs whose steps train the policy on batches of groups and push its weights."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rl_megatron.agents.source import environment_row
from rl_megatron.algorithms.kl import average_age
from rl_megatron.config.beside import frozen_folders, reference_follows
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.trajectories import spans_of_requests
from rl_megatron.files import remove_folder
from rl_megatron.interfaces import Learner, Roles
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.rollout.batch import UNTAUGHT, RolloutBatch, Waiting
from rl_megatron.rollout.stream import Stream
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.credit import groups_that_differ, shared_states
from rl_megatron.training.evaluation import Evaluation, EvaluationBeside
from rl_megatron.training.update import Update
from rl_megatron.types import RolloutGroup, Trajectory

logger = logging.getLogger(__name__)

_FOLDERS = {"policy": "learner"}  # a checkpoint's folder by role; others are named as their role


@dataclass(slots=True, kw_only=True)
class GroupJob(ABC):
    """A Job of ``training.loop``; its subclasses produce the groups."""

    config: RunConfig
    roles: Roles
    prompts: PromptStream
    evaluation: Evaluation
    update: Update
    start_folder: Path  # the policy is exported here at the start, if a reference or a critic starts from it
    recorder: Recorder
    route: str  # of pushes, in rows of metrics
    name: str = "reinforcement"
    beside: EvaluationBeside | None = None  # evaluates while later steps train, with eval.mode=beside
    number: int = 0  # of the last step
    stream: Stream | None = None  # of groups that are sampled ahead
    places: tuple[Waiting, ...] = ()  # of the last batch

    @abstractmethod
    async def take(self) -> RolloutBatch:
        """The batch of step ``number``. Raises DataError if faults left nothing in it to train on."""

    @property
    def first_step_is_saved(self) -> bool:
        """Whether a warm start came before this job."""
        return self.config.warm_start.steps > 0

    async def start(self, *, fresh: bool) -> Row | None:
        """Load the weights of reference and critic.

        Where servers take turns with the learner, they have left their GPUs to the models that were loaded, and the
        policy's weights are pushed again.
        """
        await asyncio.to_thread(self.prompts.read_ahead)
        if fresh and self.stream is not None:
            await asyncio.to_thread(self.stream.start_over)
        loaded = await self.start_models(fresh=fresh)
        if loaded and self.config.rollout.server.colocated:
            await self.roles.weights.push(self.number)
        return {"step": 0, "phase": "rl"} if fresh else None

    async def start_models(self, *, fresh: bool) -> bool:
        """Load the weights of frozen models, and on a fresh start those of a critic and of a reference that follows the
        policy, which a checkpoint restores itself.

        Returns whether there was anything to load.
        """
        roles, critic = self.roles, self.config.algorithm.critic
        wanted = (
            self.config.needs_reference and self.config.reference is None,
            "critic" in roles.learners and critic.path is None,
        )
        if fresh and any(wanted):
            remove_folder(self.start_folder)  # left by a run that was killed before its first checkpoint
            await roles.weights.export(self.start_folder)
        if fresh and "critic" in roles.learners:
            await roles.learners["critic"].start_from(critic.path or self.start_folder)
        frozen = {role: folder for role, (folder, _) in frozen_folders(self.config).items() if role in roles.frozen}
        if not fresh and reference_follows(self.config):
            del frozen["reference"]  # it is in the checkpoint
        for role, folder in frozen.items():
            await roles.frozen[role].start_from(folder or self.start_folder)
        return bool(frozen) or (fresh and "critic" in roles.learners)

    async def step(self, number: int, watch: Stopwatch) -> Row:
        """Take a batch, train on it and push the weights. Returns the metrics row."""
        self.number = number
        if self.beside is not None:
            self.beside.check()
        row = await self._train(watch)
        row |= await self._follow(watch)
        if not row["tokens/train"]:
            logger.warning("step %d has no token to train on and is skipped: the weights do not change", number)
        if self.stream is not None:
            with watch("rollout"):
                await self.stream.settled()
        row |= self._update_table()  # after all that is drawn before a push, so that draws depend on steps alone
        with watch("weights"):
            pushed = await self.roles.weights.push(number)
        if self.stream is not None:
            self.stream.pushed(number)
            row |= self.stream.row()
        watch.count("rollout", int(row["tokens/rollout"] or 0), beside=self.config.train.max_staleness > 0)
        watch.count("train", int(row["tokens/train"] or 0))
        row |= {"weights/bytes": pushed.num_bytes, "weights/route": self.route}
        row["seconds/verify"] = pushed.verify_seconds
        if pushed.quantization_error is not None:
            row["weights/quantization_error"] = pushed.quantization_error
        row |= self.roles.engine_metrics()
        return {**row, **stretch_row(row), **self.roles.rank_metrics()}

    async def _follow(self, watch: Stopwatch) -> Row:
        """Have a reference that follows the policy take a share of its weights, if that is due, and the optimizer begin
        again, if that is asked for. Returns how old those weights are that it scored this step with: a function of the
        step alone."""
        kl = self.config.algorithm.kl
        if not reference_follows(self.config) or kl.follow_rate is None:
            return {}
        if self.number % kl.follow_every == 0:
            with watch("reference"):
                await self.roles.policy.lead(kl.follow_rate)
                if kl.reset_moments:
                    await self.roles.policy.reset_moments()
        return {"kl/reference_age": average_age(self.number - 1, rate=kl.follow_rate, every=kl.follow_every)}

    async def _train(self, watch: Stopwatch) -> Row:
        """Trains on the step's batch. Returns its metrics."""
        with watch("rollout"):
            batch = await self.take()
        return await self._describe(batch) | await self.update(batch.groups, self.number, watch)

    def teaches(self, groups: Sequence[RolloutGroup]) -> list[bool]:
        """Whether each group has different rewards, and so a gradient."""
        c = self.config
        return groups_that_differ(groups, c.algorithm, max_new_tokens=c.most_sampled)

    async def _describe(self, rollouts: RolloutBatch) -> Row:
        """Record samples of a rollout batch. Returns its metrics, before training on it."""
        self.places, epochs = rollouts.places, self.prompts.epochs()  # now: groups that end meanwhile have more drawn
        return await asyncio.to_thread(self._described, rollouts, epochs)  # it visits every token, and writes to a disk

    def _described(self, rollouts: RolloutBatch, epochs: Mapping[str, float]) -> Row:
        self.recorder.write_samples(self.number, rollouts.groups)
        return {
            "step": self.number,
            "phase": "rl",
            "reward/errors": rollouts.reward_errors,
            "reward/late": rollouts.late_rewards,
            "reward/sampled_mean": rollouts.reward_sum / max(1, rollouts.num_completions),
            **rollouts.part_means(),
            "groups/trained": len(rollouts.groups),
            "groups/dropped": rollouts.dropped_groups,
            "groups/filtered": rollouts.filtered_groups,
            "tokens/rollout": rollouts.num_tokens,
            **(self._describe_groups(rollouts.groups) if rollouts.groups else {}),
            **self._describe_sources(rollouts, epochs),
        }

    def _update_table(self) -> Row:
        """Add what the step's prompts have shown to the table of pass rates; metrics ``curriculum/…``."""
        table, right = self.prompts.table, self.config.eval.success_reward
        if table is None:
            return {}
        seen = [
            (one.drawn.prompt.id, one.answered.rewards)
            for one in sorted(self.places, key=lambda place: place.drawn.ordinal)
            if one.answered is not None and one.answered.rewards and (one.kept or one.answered.reason in UNTAUGHT)
        ]
        shares = [(name, float(np.mean([reward >= right for reward in rewards]))) for name, rewards in seen]
        table.update(shares, self.number, self.prompts.left_out)
        table.track(seen)
        return dict(table.row())

    def _describe_sources(self, rollouts: RolloutBatch, epochs: Mapping[str, float]) -> Row:
        """Metrics ``source/<name>/…`` of a mixture; rewards and lengths are absent where a step has none of them."""
        row = Row()
        teach = dict(zip(map(id, rollouts.groups), self.teaches(rollouts.groups), strict=True)) if epochs else {}
        for name, passed in epochs.items():
            groups = [group for group in rollouts.groups if group.prompt.source == name]
            answers = [one.answered for one in rollouts.places if one.drawn.prompt.source == name]
            sampled = [reward for one in answers if one is not None for reward in one.rewards]
            found = {"share": len(groups) / max(1, len(rollouts.groups)), "epoch": passed}
            if sampled:
                found["sampled_reward"] = float(np.mean(sampled))
            if groups:
                trajectories = [one for group in groups for one in group.trajectories]
                found["reward"] = float(np.mean([one.reward for one in trajectories]))
                found["length"] = float(np.mean([one.num_sampled for one in trajectories]))
                found["zero_advantage"] = float(np.mean([not teach[id(group)] for group in groups]))
            row |= {f"source/{name}/{key}": value for key, value in found.items()}
        return row

    def _describe_groups(self, groups: Sequence[RolloutGroup]) -> Row:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rewards = np.array([one.reward for one in trajectories])
        lengths = np.array([one.num_sampled for one in trajectories])
        staleness = self.number - 1 - np.array([one.turns[0].spans[0].version for one in trajectories])
        cut = [one.stop == "length" for one in trajectories]
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "groups/zero_advantage_fraction": float(np.mean(np.logical_not(self.teaches(groups)))),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": int(lengths.max()),
            "response/truncated_fraction": float(np.mean(cut)),
            "staleness/mean": float(staleness.mean()),
            "staleness/max": int(staleness.max()),
            **late_row(trajectories, self.config.rollout),
            **interrupted_row(trajectories, self.config.rollout),
            **environment_row(trajectories),
            **({"groups/shared_states": shared_states(groups)} if self.config.algorithm.compares_states else {}),
            **self._describe_demonstrations(groups),
            **(self._describe_ages(trajectories, staleness) if self.config.train.max_staleness else {}),
        }

    def _describe_demonstrations(self, groups: Sequence[RolloutGroup]) -> Row:
        rewards = [
            reward for group in groups if group.demonstration is not None for reward in group.demonstration.rewards
        ]
        return {"demonstration/reward": float(np.mean(rewards))} if rewards else {}

    def _describe_ages(self, trajectories: Sequence[Trajectory], staleness: NDArray[np.int64]) -> Row:
        """Metrics of how old completions, by their oldest token, and tokens are, in pushes."""
        turns = [turn for one in trajectories for turn in one.turns]
        ends = [(*(span.start for span in turn.spans[1:]), len(turn.logprobs)) for turn in turns]
        tokens = [
            (end - span.start, self.number - 1 - span.version)
            for turn, until in zip(turns, ends, strict=True)
            for span, end in zip(turn.spans, until, strict=True)
        ]
        shares = {f"staleness/share/v{age}": float(np.mean(staleness == age)) for age in range(staleness.max() + 1)}
        return {
            "staleness/p95": int(np.quantile(staleness, 0.95, method="higher")),
            "staleness/tokens_mean": sum(n * age for n, age in tokens) / max(1, sum(n for n, _ in tokens)),
            **shares,
            **(carried_row(trajectories, self.config.rollout) if self.config.rollout.served else {}),
        }

    async def evaluate(self, watch: Stopwatch) -> Row:
        """Figures of the sets that are due, of the weights that were pushed last, timed as ``eval``.

        With eval.mode=beside it returns figures before the first step and after the last one alone; other evaluations
        end later.
        """
        if self.beside is not None and 0 < self.number < self.config.train.steps:
            self.beside.begin(self.number)
            return {}
        with watch("eval"):
            if self.beside is not None:
                await self.beside.finish(self.number)
            return await self.evaluation.row(self.number)

    def enough(self, row: Row) -> bool:
        """Always False: the job makes all its steps."""
        return False

    def learners(self) -> dict[str, Learner]:
        """The learners whose shards a checkpoint holds, keyed by subfolder."""
        return {_FOLDERS.get(role, role): learner for role, learner in self.roles.learners.items()}

    async def before_save(self, stop: asyncio.Event) -> None:
        """Have ``state`` know the tokens of groups that are being sampled. Waits for an evaluation of an earlier step,
        whose weights are not in this checkpoint, unless ``stop`` is set."""
        if self.beside is not None:
            await self.beside.finish(self.number, stop)
        if self.stream is not None:
            await self.stream.interrupt()

    def state(self) -> TrainerState:
        """The position in the data, what was drawn and is not trained on yet, and the algorithm's state."""
        return TrainerState(
            step=self.number,
            prompts=self.prompts.state(),
            left_out=tuple(sorted(self.prompts.left_out)),
            stream=None if self.stream is None else self.stream.state(),
            memory=self.update.state,
            skipped={one.name: one.in_a_row for one in self.update.of_models},
            table=None if self.prompts.table is None else self.prompts.table.state(),
        )

    async def close(self) -> None:
        """End the sampling of groups, and an evaluation under way; wait until their environments are closed."""
        if self.beside is not None:
            await self.beside.close()
        if self.stream is not None:
            await self.stream.close()
        await self.evaluation.closed()

    async def restore(self, state: TrainerState) -> None:
        """Continue from ``state``, and push the weights."""
        self.number = state.step
        await asyncio.to_thread(self.prompts.digest)
        self.prompts.restore(state.prompts, state.left_out)
        if self.prompts.table is not None:
            self.prompts.table.restore(state.table)
        if self.stream is not None and state.stream is not None:
            await asyncio.to_thread(self.stream.restore, state.stream)  # reads all of the ledger
        if state.memory is not None:
            self.update.state = state.memory
            for one in self.update.of_models:
                one.in_a_row = state.skipped.get(one.name, 0)
        await self.roles.weights.push(self.number)
        if self.beside is not None and 0 < self.number < self.config.train.steps and self.evaluation.due(self.number):
            self.beside.begin(self.number)


def carried_row(trajectories: Sequence[Trajectory], section: RolloutSection) -> Row:
    """Tokens of these that pushes met, by the starts of their requests' spans: those that were gone on from, and those
    whose keys and values servers computed again, unless they keep them."""
    requests = [spans for one in trajectories for row in one.chains for spans in spans_of_requests(row.turns)]
    row: Row = {"in_flight/resumed_tokens": sum(spans[-1].start for spans in requests if spans)}
    if section.server.running_requests != "keep_cache":
        row["in_flight/recomputed_tokens"] = sum(span.start for spans in requests for span in spans)
    return row


def stretch_row(row: Row) -> Row:
    """How long a step takes, over what its longer half takes: the learner's work, or the sampling with all slots in
    use; where it is known for which share of the step each was idle."""
    idle = [row.get("idle/learner_fraction"), row.get("idle/engine_fraction")]
    shares = [share for share in idle if isinstance(share, float)]
    return {"overlap/stretch": 1 / (1 - min(shares))} if len(shares) == 2 and min(shares) < 1 else {}


def late_row(trajectories: Sequence[Trajectory], section: RolloutSection) -> Row:
    """The share that was ended for its time: truncated ones with fewer tokens than they might have."""
    if section.max_seconds is None:
        return {}
    late = [one.stop == "length" and one.num_sampled < section.max_new_tokens for one in trajectories]
    return {"response/late_fraction": float(np.mean(late))}


def interrupted_row(trajectories: Sequence[Trajectory], section: RolloutSection) -> Row:
    """The share whose thinking was ended by a text: those of two turns."""
    if not section.interrupt.earliest:
        return {}
    return {"response/interrupted_fraction": float(np.mean([len(one.turns) > 1 for one in trajectories]))}
