"""Compares the bytes that the fullest GPU must hold with its memory."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.subject import Found, Subject, unchecked
from rl_megatron.scaling.memory import check_memory


def check(subject: Subject) -> Iterator[Found]:
    """Compares what the learner needs with ``slurm.gpu_memory_gb``. Raises ConfigError where it does not fit."""
    config = subject.config
    if config.learner.device == "cpu":
        return
    if check_memory(config, subject.shape) is None:
        yield unchecked("the memory of the GPUs, whose size is not given (slurm.gpu_memory_gb)")
