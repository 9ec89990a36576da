"""What the environment of a rank's process says before torch is loaded there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


def variables(*, threads: int, device: str) -> Mapping[str, str]:
    """For a rank of ``learner.device`` with so many CPU threads. One of the CPU sees no GPU, where there are some."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {"OMP_NUM_THREADS": str(threads), **hidden}


@contextlib.contextmanager
def inherited(*, threads: int, device: str) -> Iterator[None]:
    """Processes that start meanwhile inherit the variables from this one."""
    new = variables(threads=threads, device=device)
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
