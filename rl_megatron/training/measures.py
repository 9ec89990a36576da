"""Metrics of an update: of the measured batch, and of all its optimizer steps together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_megatron.algorithms.mismatch import expert_metrics, mismatch_metrics
from rl_megatron.algorithms.quantiles import ratio_quantiles
from rl_megatron.observability.recorder import Row
from rl_megatron.types import Samples, StepResult

QUANTILES = {"ratio/p01": 0.01, "ratio/p50": 0.5, "ratio/p99": 0.99}


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch's samples with all scores that its algorithm asks for."""

    samples: Samples
    current: Tensor | None  # [N] log-probs of the policy at the start of the update
    next_values: Tensor | None  # [S]


def mismatch_row(found: Measured) -> Row:
    """Nothing where the algorithm does not ask the learner before it trains."""
    samples, current = found.samples, found.current
    if current is None:
        return {}
    row: Row = {**mismatch_metrics(current, samples.rollout_logprobs, samples.mask, samples.cu_seqlens)}
    if samples.routes is not None:
        row |= expert_metrics(current, samples.rollout_logprobs, samples.mask, samples.routes)
    return row


def advantage_row(samples: Samples) -> Row:
    """Mean and standard deviation over the trained tokens."""
    advantages = samples.advantages[samples.mask].double()
    return {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std(correction=0))}


def critic_row(results: Sequence[StepResult]) -> Row:
    """The critic's own metrics: its loss, gradient norm and means; the rest of a learner's would hide the policy's."""
    combined = combine(results)
    own = {name: value for name, value in combined.items() if name.startswith("critic/")}
    return {**own, "critic/loss": combined["loss"], "critic/grad_norm": combined["grad_norm"]}


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
