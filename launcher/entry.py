"""The console command's entry: until its imports are done there is nothing that Ctrl-C could leave behind."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from rl_megatron.errors import RLMegatronError

_INTERRUPTED = 130  # a shell's status of what Ctrl-C ended


def main() -> None:
    """Import the command line and run it."""
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from launcher.__main__ import main as run
    except RLMegatronError as error:  # of an installed option, whose keys the configuration is made with
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
