"""Compares the memory that the fullest GPU needs with the memory that it has."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.subject import Found, Subject, unchecked
from rl_megatron.scaling.memory import check_memory


def check(subject: Subject) -> Iterator[Found]:
    """Compares the learner's memory with ``slurm.gpu_memory_gb``. Raises ConfigError if it does not fit."""
    config = subject.config
    if config.learner.device == "cpu":
        return
    if check_memory(config, subject.shape) is None:
        yield unchecked("the memory of the GPUs, because slurm.gpu_memory_gb is not set")
