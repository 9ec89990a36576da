"""Reduces ranks' shares of a loss and its metrics to global values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_megatron.types import Counts, LossOutput, Metric, Over

_SIGNS: Mapping[Over, float] = {"min": -1.0, "max": 1.0}  # others are summed


def reduce_outputs(outputs: Sequence[LossOutput]) -> dict[str, Metric[float | Counts]]:
    """Global ``loss`` and metrics of a (mini)batch from each rank's micro-batches. Every last-stage rank calls it."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    kinds = outputs[0].metrics
    adding = [name for name, metric in kinds.items() if metric.over not in _SIGNS]
    shares = [torch.cat([o.loss.detach()[None], *(_flat(o, name) for name in adding)]).double() for o in outputs]
    total = torch.stack(shares).sum(0)
    dist.all_reduce(total, group=group)
    read = iter(total.tolist())  # one wait for the GPU
    loss = next(read)
    values: dict[str, float | Counts] = {}
    for name in adding:
        counts = tuple(islice(read, kinds[name].value.numel()))
        values[name] = counts if kinds[name].over == "histogram" else counts[0]
    extremes = {name: _SIGNS[metric.over] for name, metric in kinds.items() if metric.over in _SIGNS}
    if extremes:
        signs = total.new_tensor(list(extremes.values()))
        parts = [torch.cat([_flat(o, name) for name in extremes]).double() for o in outputs]
        most = (torch.stack(parts) * signs).amax(0)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        values.update(zip(extremes, (most * signs).tolist(), strict=True))
    found = {name: Metric(value=values[name], over=metric.over, weight=metric.weight) for name, metric in kinds.items()}
    return {"loss": Metric(value=loss), **found}


def _flat(output: LossOutput, name: str) -> Tensor:
    return output.metrics[name].value.flatten()
