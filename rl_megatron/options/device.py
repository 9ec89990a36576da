"""``learner.device``: the device of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


GPU = "cuda"
"""``learner.device`` of ranks on GPUs."""


class DeviceKeys(Section):
    """The key of `Device`."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: CPUs, which communicate over gloo, or GPUs, over NCCL."""


class Device(Option):
    """CPUs or GPUs."""

    keys = DeviceKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Initialisation on the CPU for CPU ranks, because megatron-core's default uses the current GPU."""
        return Keywords(model={"use_cpu_initialization": learner.device == "cpu"})
