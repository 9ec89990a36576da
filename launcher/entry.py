"""The console command's entry: until its imports are done there is nothing that Ctrl-C could leave behind."""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130  # a shell's status of what Ctrl-C ended


def main() -> None:
    """Import the command line and run it."""
    before = signal.signal(signal.SIGINT, _leave)
    from launcher.__main__ import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
