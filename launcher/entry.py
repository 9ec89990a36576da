"""The console command's entry: exits quietly on Ctrl-C while the command line is still being imported."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from rl_megatron.errors import RLMegatronError

_INTERRUPTED = 130  # a shell's status for a process that Ctrl-C ended


def main() -> None:
    """Import the command line and run it."""
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from launcher.__main__ import main as run
    except RLMegatronError as error:  # from an installed option, whose keys are part of the configuration
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
