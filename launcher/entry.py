"""The console command's entry: exits quietly on Ctrl-C while the command line is still being imported."""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130  # a shell's status for a process that Ctrl-C ended


def main() -> None:
    """Imports the command line and runs it."""
    before = signal.signal(signal.SIGINT, _leave)
    from launcher.__main__ import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
