"""The metrics of a loss, and the oracle for reducing their shares to one value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_megatron.types import LossOutput, Over

TOGETHER = {"sum": torch.sum, "mean": torch.sum, "min": torch.amin, "max": torch.amax}


def values(output: LossOutput, *kinds: Over) -> dict[str, Tensor]:
    """The metrics that are reduced in one of these ways, or all, by name."""
    return {name: metric.value for name, metric in output.metrics.items() if not kinds or metric.over in kinds}


def joined(shares: Sequence[LossOutput]) -> dict[str, Tensor]:
    """The metrics of a batch, from those of its parts."""
    first, *_ = shares
    parts = {name: torch.stack([share.metrics[name].value for share in shares]) for name in first.metrics}
    return {name: TOGETHER[metric.over](parts[name], 0) for name, metric in first.metrics.items()}
