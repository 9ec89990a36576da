"""``learner.device``: the device of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class DeviceKeys(Section):
    """Its key."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu over gloo, cuda over NCCL."""


class Device(Option):
    """CPUs or GPUs."""

    keys = DeviceKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """megatron-core asks for the current GPU, where it is not told to leave that."""
        return Keywords(model={"use_cpu_initialization": learner.device == "cpu"})
