"""Shares of a loss and its metrics to global values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_megatron.types import LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The global loss, metrics and histograms of a (mini)batch."""

    loss: float
    metrics: dict[str, float]
    histograms: dict[str, tuple[float, ...]]


def reduce_outputs(outputs: Sequence[LossOutput]) -> Reduced:
    """Shares of this rank's micro-batches to global values. Last-stage ranks call it together."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metrics: dict[str, float] = {}
    names, bins = ["loss", *outputs[0].means], {name: len(x) for name, x in outputs[0].histograms.items()}
    sums = [
        torch.cat([torch.stack([o.loss.detach(), *o.means.values()]).double(), *map(_doubles, o.histograms.values())])
        for o in outputs
    ]
    total = torch.stack(sums).sum(0)
    dist.all_reduce(total, group=group)
    counts = total[len(names) :].split(list(bins.values()))
    metrics.update(zip(names, total[: len(names)].tolist(), strict=True))
    for field, sign in (("minima", -1.0), ("maxima", 1.0)):
        rows = [getattr(o, field) for o in outputs]
        if rows[0]:
            most = sign * torch.stack([torch.stack(list(row.values())) for row in rows]).double()
            most = most.amax(0)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            metrics.update(zip(rows[0], (sign * most).tolist(), strict=True))
    return Reduced(
        loss=metrics.pop("loss"),
        metrics=metrics,
        histograms={name: tuple(x.tolist()) for name, x in zip(bins, counts, strict=True)},
    )


def _doubles(values: Tensor) -> Tensor:
    return values.double()
