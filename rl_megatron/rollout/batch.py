"""A rollout batch: its groups and the counts of what went wrong; and the protocol of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from rl_megatron.types import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups of one ``sample``, and counts of what was scored, failed or left out."""

    groups: tuple[RolloutGroup, ...] = ()
    num_completions: int = 0  # scored, including those of groups left out later
    reward_sum: float = 0.0  # of these
    reward_errors: int = 0  # completions whose reward raised, timed out or was not finite
    dropped_groups: int = 0  # groups left out for a failed reward
    filtered_groups: int = 0  # groups left out because their rewards are equal
    part_sums: Mapping[str, float] = field(default_factory=dict)  # of each part of a weighted reward, unweighted
    part_completions: int = 0  # completions in part_sums: those whose every part was finite

    def filtered(self, teaches: Sequence[bool]) -> RolloutBatch:
        """The batch without groups of equal rewards (DAPO, arXiv:2503.14476)."""
        kept = tuple(group for group, does in zip(self.groups, teaches, strict=True) if does)
        return replace(self, groups=kept, filtered_groups=self.filtered_groups + len(self.groups) - len(kept))

    def joined(self, other: RolloutBatch) -> RolloutBatch:
        """Both batches as one, this one's groups first."""
        names = {f.name for f in fields(self)} - {"part_sums"}
        parts = {**self.part_sums, **other.part_sums}
        return RolloutBatch(
            part_sums={name: self.part_sums.get(name, 0.0) + other.part_sums.get(name, 0.0) for name in parts},
            **{name: getattr(self, name) + getattr(other, name) for name in names},
        )

    def cut(self, num_groups: int) -> RolloutBatch:
        """The batch with its first ``num_groups`` groups alone."""
        return replace(self, groups=self.groups[:num_groups])

    def part_means(self) -> dict[str, float]:
        """``reward/part/<name>`` of each part, over the same completions as ``reward/sampled_mean``."""
        return {f"reward/part/{name}": total / self.part_completions for name, total in self.part_sums.items()}


class RolloutSource(Protocol):
    """Samples the completions that a job trains on."""

    async def sample(self, prompts: Sequence[Prompt], *, step: int) -> RolloutBatch:
        """Scored completions of each prompt, for the ``step``-th batch; groups in the order of ``prompts``."""
        ...
