"""``learner.deterministic``: kernels that add in one order, so that a run's numbers can be had again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class DeterministicKeys(Section):
    """The key of `Deterministic`."""

    deterministic: bool = False
    """Whether ranks use kernels alone that add in the same order each time: of two equal runs on the same machines
    every number is then equal to the bit, on GPUs too. They are slower there, by how much is not measured; CPUs' are
    such kernels anyway (docs/mismatch.md)."""


class Deterministic(Option):
    """Megatron-core's mode, and torch's (`learner.world`); a rank's process sets variables for NCCL, cuBLAS and
    TransformerEngine (`launcher.processes.environment`)."""

    keys = DeterministicKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """DeepEP, whose order of sums nothing fixes."""
        if learner.deterministic and learner.dispatcher != "alltoall":
            yield (
                f"learner.deterministic=true with learner.dispatcher={learner.dispatcher}: its kernels have no "
                "deterministic mode; set learner.dispatcher=alltoall"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Megatron-core's mode: its embedding's gradient, and TransformerEngine's attention, which checks for its
        variable."""
        return Keywords(model={"deterministic_mode": True} if learner.deterministic else {})
