"""Finds why megatron could not write or read a checkpoint: it hides the cause in exceptions of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

_PROBE_BYTES = 4 << 20


def why_not_written(folder: Path, error: BaseException) -> str | None:
    """The file system's error behind a failed save. torch's zip writer hides it, so a small file is written to see."""
    for one in _causes(error):
        if isinstance(one, OSError) and one.strerror:
            return one.strerror
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as said:
        return said.strerror
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """The exception of every rank that megatron reported here."""
    return [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def told(error: BaseException) -> str:
    """The first line of the first cause's message; torch appends stacks to it."""
    return (str(next(iter(_causes(error)), "another rank failed")).strip().splitlines() or [type(error).__name__])[0]
