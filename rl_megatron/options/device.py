"""``learner.device``: where parameters are made."""

from __future__ import annotations

from typing import Literal

from rl_megatron.options.option import Option
from rl_megatron.section import Section


class DeviceKeys(Section):
    """Its key."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu over gloo, cuda over NCCL."""


class Device(Option):
    """CPUs or GPUs."""

    keys = DeviceKeys
