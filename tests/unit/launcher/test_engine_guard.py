"""The guard ends a server with its children when the trainer's pipe closes, and tells how a server ended by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from launcher import engine_guard
from tests.e2e.processes import alive, eventually

SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
print('up', flush=True)
time.sleep(1000)
"""


def guard(folder: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(engine_guard.__file__), str(folder), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_server_and_its_children_end_with_the_trainer(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    process = guard(folder, sys.executable, "-c", SERVER)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    process.stdin.close()
    process.wait(30)
    eventually(lambda: not any(alive(p) for p in family), "the server and its child to end", 10)
    assert not folder.exists()


def test_a_server_that_ends_gives_its_status_and_leaves_the_weights(tmp_path: Path) -> None:
    process = guard(tmp_path, sys.executable, "-c", "import sys; sys.exit(7)")
    assert process.wait(30) == 7
    assert tmp_path.exists()
