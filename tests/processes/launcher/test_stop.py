"""Signals that a scheduler sends, to a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.runs.stop import Stop
from rl_megatron.observability.progress import Progress

CODE = """
import asyncio, os, signal
from pathlib import Path
from launcher.runs.stop import stop_signals
from rl_megatron.observability.progress import Progress

async def main():
    with Progress(1, "plain", "run", run_folder=Path("run")) as progress, stop_signals(progress) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(60):
            await stop.wait()
        assert stop.comes_back
    os.kill(os.getpid(), signal.SIGUSR1)

async def held_up():
    with Progress(1, "plain", "run", run_folder=Path("run")) as progress, stop_signals(progress):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

async def later():
    with Progress(1, "plain", "run", run_folder=Path("run")) as progress, stop_signals(progress) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one waits for the loop")

asyncio.run(main())
for twice in held_up, later:
    try:
        asyncio.run(twice())
    except KeyboardInterrupt:
        print("interrupted")
os.kill(os.getpid(), signal.SIGUSR1)
print("at its end")
"""


def test_signals_stop_a_run_and_the_second_ctrl_c_interrupts_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "SIGUSR1: finishing and saving the current step" in done.stdout
    assert done.stdout.endswith("at its end\n")
    assert done.stdout.count("interrupted\n") == 2  # by the second Ctrl-C, however soon it comes


@pytest.mark.parametrize(
    ("own", "of_ranks", "comes_back", "exports"),
    [
        ("SIGTERM", [], False, True),
        ("SIGINT", ["SIGINT"], False, True),  # Ctrl-C reaches srun, too
        ("SIGUSR1", [], True, False),
        (None, ["SIGTERM"], False, False),  # before preemption
        ("SIGTERM", ["SIGTERM"] * 2, False, False),  # scancel
        ("SIGUSR1", ["SIGTERM"], True, False),
    ],
)
def test_a_run_whose_job_ends_soon_exports_nothing(
    own: str | None, of_ranks: list[str], comes_back: bool, exports: bool, tmp_path: Path
) -> None:
    with Progress(1, "plain", "run", run_folder=tmp_path) as progress:
        stop = Stop(progress)
        if own is not None:
            stop.ask(own)
        for name in of_ranks:
            stop.forward(name)
    assert (stop.is_set(), stop.comes_back, stop.exports) == (True, comes_back, exports)
