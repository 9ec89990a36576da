"""Advantages of rewards that are weighted sums, from each part by itself: GDPO (arXiv:2601.05242).

Letters: K trajectories, k of them whose reward has a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import LEVELS, ROUNDING, row_advantages
from rl_megatron.algorithms.segments import segment_sum
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import DataError
from rl_megatron.types import RolloutGroup


def parts_advantages(groups: Sequence[RolloutGroup], ids: Tensor, lengths: Tensor, section: AlgorithmSection) -> Tensor:
    """The weighted sum [K] float32 of what `row_advantages` gives for each part; ``ids`` and ``lengths`` [K].

    The mean and the std of a batch are over the trajectories that have the part. Raises DataError for a trajectory
    without parts.
    """
    return _summed(groups, ids, lengths, section)[0].float()


def parts_differ(groups: Sequence[RolloutGroup], ids: Tensor, lengths: Tensor, section: AlgorithmSection) -> Tensor:
    """Whether the parts of each group [groups] bool give it an advantage, whose sum is not 0 but for rounding.

    Of the group alone: where the std is of the batch, advantages of two parts are taken not to cancel.
    """
    mean = "group" if section.advantage_mean in LEVELS else None
    scaled = section.advantage_std == "group"
    total, largest = _summed(groups, ids, lengths, section, mean=mean, std=None if scaled else "none")
    found = total.abs() if scaled or section.advantage_std == "none" else largest
    return segment_sum((found > ROUNDING).int(), ids, len(groups)) > 0


def _summed(
    groups: Sequence[RolloutGroup],
    ids: Tensor,
    lengths: Tensor,
    section: AlgorithmSection,
    *,
    mean: str | None = None,
    std: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of parts' advantages, and the largest of its terms, [K] float64 each.

    Terms that cancel leave exactly 0: whitening divides a batch's sums by their std, and would make rounding large.
    """
    total, largest = torch.zeros(2, len(ids), dtype=torch.float64)
    for part in _parts_of(groups):
        above = part.weights * row_advantages(part.values, ids[part.of], lengths[part.of], section, mean=mean, std=std)
        total[part.of] += above
        largest[part.of] = largest[part.of].maximum(above.abs())
    return torch.where(total.abs() > ROUNDING * largest, total, 0.0), largest


@dataclass(frozen=True, slots=True)
class _Part:
    of: Tensor  # [k] int64, the trajectories
    values: Tensor  # [k] float32
    weights: Tensor  # [k] float64


def _parts_of(groups: Sequence[RolloutGroup]) -> Iterator[_Part]:
    """Each part, by name: sources have their own. One of weight 0 is recorded alone, and may be beyond float32."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    trajectories = ((group.prompt.id, one) for group in groups for one in group.trajectories)
    for place, (prompt, one) in enumerate(trajectories):
        if not one.parts:
            raise DataError(
                f"algorithm.advantage_of=parts, but a reward of prompt {prompt!r} has no parts: it was given by a "
                "version that kept none, or by a source of your own; start a new run, or set advantage_of=sum"
            )
        for name, (value, weight) in one.parts.items():
            if weight:
                found.setdefault(name, []).append((place, value, weight))
    for rows in found.values():
        of, values, weights = zip(*rows, strict=True)
        yield _Part(torch.tensor(of), torch.tensor(values), torch.tensor(weights, dtype=torch.float64))
