"""Metrics of a rollout batch, before it is trained on: functions of its groups alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_megatron.agents.source import environment_row
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.observability.recorder import Row
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.training.credit import groups_that_differ
from rl_megatron.types import RolloutGroup, Trajectory


def rollout_row(config: RunConfig, step: int, rollouts: RolloutBatch, epochs: Mapping[str, float]) -> Row:
    """All metrics of the batch of a step; ``epochs`` are those of the sources of a mixture, by name."""
    return {
        "step": step,
        "phase": "rl",
        "reward/errors": rollouts.reward_errors,
        "reward/late": rollouts.late_rewards,
        "reward/sampled_mean": rollouts.reward_sum / max(1, rollouts.num_completions),
        **rollouts.part_means(),
        "groups/trained": len(rollouts.groups),
        "groups/dropped": rollouts.dropped_groups,
        "groups/filtered": rollouts.filtered_groups,
        "tokens/rollout": rollouts.num_tokens,
        **(_group_row(config, step, rollouts.groups) if rollouts.groups else {}),
        **source_row(config, rollouts, epochs),
    }


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
        **interrupted_row(trajectories, config.rollout),
        **environment_row(trajectories),
        **_demonstration_row(groups),
        **{f"staleness/share/v{age}": float(np.mean(staleness == age)) for age in range(staleness.max() + 1) if aged},
    }


def _demonstration_row(groups: Sequence[RolloutGroup]) -> Row:
    rewards = [reward for group in groups if group.demonstration is not None for reward in group.demonstration.rewards]
    return {"demonstration/reward": float(np.mean(rewards))} if rewards else {}


def source_row(config: RunConfig, rollouts: RolloutBatch, epochs: Mapping[str, float]) -> Row:
    """Metrics ``source/<name>/…`` of a mixture; rewards are absent where a step has none of them."""
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
    """Whether each group has different rewards, and so a gradient."""
    return groups_that_differ(groups, config.algorithm, max_new_tokens=config.most_sampled)


def interrupted_row(trajectories: Sequence[Trajectory], section: RolloutSection) -> Row:
    """The share whose thinking was ended by a text: those of two turns."""
    if not section.interrupt.earliest:
        return {}
    return {"response/interrupted_fraction": float(np.mean([len(one.turns) > 1 for one in trajectories]))}
