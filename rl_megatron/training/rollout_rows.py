"""Metrics of a rollout batch, before it is trained on: functions of its groups alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rl_megatron.agents.source import environment_row
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.trajectories import spans_of_requests
from rl_megatron.observability.recorder import Row
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.training.credit import groups_that_differ, shared_states
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
        **late_row(trajectories, config.rollout),
        **interrupted_row(trajectories, config.rollout),
        **environment_row(trajectories),
        **({"groups/shared_states": shared_states(groups)} if config.algorithm.compares_states else {}),
        **_demonstration_row(groups),
        **(_age_row(config, step, trajectories, staleness) if config.train.max_staleness else {}),
    }


def _demonstration_row(groups: Sequence[RolloutGroup]) -> Row:
    rewards = [reward for group in groups if group.demonstration is not None for reward in group.demonstration.rewards]
    return {"demonstration/reward": float(np.mean(rewards))} if rewards else {}


def _age_row(config: RunConfig, step: int, trajectories: Sequence[Trajectory], staleness: NDArray[np.int64]) -> Row:
    """Metrics of how old completions, by their oldest token, and tokens are, in pushes."""
    turns = [turn for one in trajectories for turn in one.turns]
    ends = [(*(span.start for span in turn.spans[1:]), len(turn.logprobs)) for turn in turns]
    tokens = [
        (end - span.start, step - 1 - span.version)
        for turn, until in zip(turns, ends, strict=True)
        for span, end in zip(turn.spans, until, strict=True)
    ]
    shares = {f"staleness/share/v{age}": float(np.mean(staleness == age)) for age in range(staleness.max() + 1)}
    return {
        "staleness/p95": int(np.quantile(staleness, 0.95, method="higher")),
        "staleness/tokens_mean": sum(n * age for n, age in tokens) / max(1, sum(n for n, _ in tokens)),
        **shares,
        **(carried_row(trajectories, config.rollout) if config.rollout.served else {}),
    }


def source_row(config: RunConfig, rollouts: RolloutBatch, epochs: Mapping[str, float]) -> Row:
    """Metrics ``source/<name>/…`` of a mixture; rewards and lengths are absent where a step has none of them."""
    row = Row()
    teach = dict(zip(map(id, rollouts.groups), _teaches(config, rollouts.groups), strict=True)) if epochs else {}
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


def _teaches(config: RunConfig, groups: Sequence[RolloutGroup]) -> list[bool]:
    """Whether each group has different rewards, and so a gradient."""
    return groups_that_differ(groups, config.algorithm, max_new_tokens=config.most_sampled)


def carried_row(trajectories: Sequence[Trajectory], section: RolloutSection) -> Row:
    """Tokens of these that pushes met, by the starts of their requests' spans: those that were gone on from, and those
    whose keys and values servers computed again, unless they keep them."""
    requests = [spans for one in trajectories for row in one.chains for spans in spans_of_requests(row.turns)]
    row: Row = {"in_flight/resumed_tokens": sum(spans[-1].start for spans in requests if spans)}
    if section.server.running_requests != "keep_cache":
        row["in_flight/recomputed_tokens"] = sum(span.start for spans in requests for span in spans)
    return row


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


def stretch_row(row: Row) -> Row:
    """How long a step takes, over what its longer half takes: the learner's work, or the sampling with all slots in
    use; where it is known for which share of the step each was idle."""
    idle = [row.get("idle/learner_fraction"), row.get("idle/engine_fraction")]
    shares = [share for share in idle if isinstance(share, float)]
    return {"overlap/stretch": 1 / (1 - min(shares))} if len(shares) == 2 and min(shares) < 1 else {}
