"""Computes the metrics of an update: of the scored batch, and of all its optimizer steps together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_megatron import feature
from rl_megatron.algorithms.losses import MEANS_OF_RATIOS
from rl_megatron.algorithms.mismatch import mismatch_metrics
from rl_megatron.algorithms.segments import differ
from rl_megatron.config.run import RunConfig
from rl_megatron.observability.recorder import Row
from rl_megatron.types import Metric, Over, RolloutGroup, Samples, StepResult, Want

LOGPROBS: frozenset[Want] = frozenset({"logprobs"})


def wanted_of_policy(config: RunConfig) -> frozenset[Want]:
    """Nothing, or log-probs; what features need; the entropy if it chooses tokens; the norms that weigh an optimal
    baseline."""
    wanted = feature.wanted(config)
    if not config.algorithm.scores_policy and not wanted:
        return wanted
    wanted |= LOGPROBS
    if config.algorithm.tokens.choose == "top_entropy":
        wanted |= {"entropy"}
    return wanted | {"logit_norms"} if config.algorithm.credit == "optimal" else wanted


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch's samples with all scores that the algorithm needs."""

    samples: Samples
    policy: Mapping[Want, Tensor]  # its scores at the start of the update that were asked for, [N, ...] each
    next_values: Tensor | None = None  # [S]

    @property
    def current(self) -> Tensor | None:
        """The policy's log-probs [N] at the start of the update."""
        return self.policy.get("logprobs")


def mismatch_row(found: Measured) -> Row:
    """Metrics of the gap between engine and learner; empty if the algorithm needs no log-probs before training."""
    samples, current = found.samples, found.current
    if current is None:
        return {}
    sampled = samples.mask if samples.demonstrated is None else samples.mask & ~samples.demonstrated
    return {**mismatch_metrics(current, samples.rollout_logprobs, sampled, samples.cu_seqlens)}


def advantage_row(samples: Samples) -> Row:
    """Mean and standard deviation over the trained tokens."""
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


@dataclass(frozen=True, slots=True)
class Made:
    """An optimizer step that was made: ``loss``, its metrics, and the step's result."""

    of_loss: Mapping[str, Metric[float]]
    step: StepResult

    @property
    def loss(self) -> float:
        """The loss of the batch."""
        return self.of_loss["loss"].value


def policy_row(steps: Sequence[Made]) -> Row:
    """Metrics over the policy's optimizer steps: loss, gradient norm, metrics of the loss and of the observers."""
    if not steps:
        return {}
    row = _merged([made.of_loss for made in steps]) | {"grad_norm": _grad_norm(steps)}
    row |= _merged([made.step.metrics for made in steps])
    if "sampled/share" in row:
        row = _of_either(row)
    if "ratio/share" in row:
        share = float(row["ratio/share"] or 0)
        row |= {name: float(row[name] or 0) / share for name in MEANS_OF_RATIOS}
        del row["ratio/share"]
        first, second = float(row["ratio/mean"] or 0), float(row.pop("ratio/second_moment") or 0)
        row["ratio/effective_fraction"] = first**2 / second if second else math.nan
    return row


def _of_either(row: Row) -> Row:
    """With means over tokens that were sampled, and over those that were demonstrated, in place of their sums over
    both; without those of which there is none."""
    sampled, shown = float(row.pop("sampled/share") or 0), float(row["demonstration/share"] or 0)
    means = {**dict.fromkeys(("entropy", "kl/old_policy"), sampled), "demonstration/probability": shown}
    kept = {name: x for name, x in row.items() if sampled or not name.startswith(("ratio", "clip_fraction"))}
    row = {name: x for name, x in kept.items() if name not in means}
    return row | {name: float(kept[name] or 0) / share for name, share in means.items() if share}


def critic_row(steps: Sequence[Made]) -> Row:
    """Metrics over the critic's optimizer steps, without observers, as these would overwrite the policy's."""
    if not steps:
        return {}
    row = _merged([made.of_loss for made in steps])
    return {"critic/loss": row.pop("loss"), "critic/grad_norm": _grad_norm(steps), **row}


def _grad_norm(steps: Sequence[Made]) -> float:
    return math.fsum(made.step.grad_norm for made in steps) / len(steps)


def _merged(steps: Sequence[Mapping[str, Metric[float]]]) -> Row:
    """Merge each metric of the optimizer steps that have it."""
    found: dict[str, list[Metric[float]]] = {}
    for step in steps:
        for name, metric in step.items():
            if metric.weight or metric.over != "mean":
                found.setdefault(name, []).append(metric)
    row: Row = {}
    for name, parts in found.items():
        row[name] = _OVER[parts[0].over](parts)
    return row


def _weighted_mean(parts: Sequence[Metric[float]]) -> float:
    return math.fsum(p.value * p.weight for p in parts) / math.fsum(p.weight for p in parts)


_OVER: Mapping[Over, Callable[[Sequence[Metric[Any]]], float]] = {
    "sum": lambda parts: math.fsum(p.value for p in parts),
    "mean": _weighted_mean,
    "min": lambda parts: min(p.value for p in parts),
    "max": lambda parts: max(p.value for p in parts),
}


def token_versions(groups: Sequence[RolloutGroup], samples: Samples) -> Tensor:
    """The version that sampled each target, [N] int64, by its turn's spans; for others, that of the first."""
    rows = [row for group in groups for one in group.trajectories for row in one.chains]
    versions = torch.empty(len(samples.targets), dtype=torch.int64)
    for row, (first, stop) in zip(rows, pairwise(samples.cu_seqlens.tolist()), strict=True):
        versions[first:stop] = row.turns[0].spans[0].version
        for turn in row.turns:
            begin, end = first + turn.start - 1, first + turn.stop - 1  # of positions: their targets are one further
            for span in turn.spans:  # a later one covers what is after its start
                versions[begin + span.start : end] = span.version
    return versions
