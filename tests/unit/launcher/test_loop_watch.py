"""A controller whose event loop is blocked ends and says where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STANDING_STILL = """
import asyncio, sys, time
from pathlib import Path
from launcher.controller.loop_watch import LoopWatch
from rl_megatron.config.io import load_config

async def controller():
    LoopWatch(load_config("tiny_cpu", ["run.watchdog_seconds=1"]), Path(sys.argv[1]))
    standing_still()

def standing_still():
    time.sleep(10_000)

asyncio.run(controller())
"""


def test_it_ends_with_the_place_and_the_stacks(tmp_path: Path) -> None:
    """3 seconds."""
    done = subprocess.run(
        [sys.executable, "-c", STANDING_STILL, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "error: the controller's event loop has been blocked for 1 s (run.watchdog_seconds): it is at" in done.stderr
    assert "in standing_still" in done.stderr
    assert "in standing_still" in (tmp_path / "controller.txt").read_text()
