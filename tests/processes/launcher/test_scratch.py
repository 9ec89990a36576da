"""Temporary folders of processes that may run for weeks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from launcher.processes import engine_guard
from launcher.processes.scratch import scratch

CLEANED = """
import fcntl, os, sys
from pathlib import Path

held = os.open(os.environ["TMPDIR"], os.O_RDONLY)
try:
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    Path(sys.argv[1]).write_text("passed over")
"""


def test_what_removes_old_files_passes_it_over(tmp_path: Path) -> None:
    """systemd-tmpfiles tries to lock each folder and leaves out, with all that is in it, one that is locked."""
    with scratch(within=tmp_path) as folder:
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = True
        else:
            locked = False
        os.close(held)
    assert locked
    assert not folder.exists()


def test_what_removes_old_files_passes_a_servers_folder_over(tmp_path: Path) -> None:
    said = tmp_path / "said"
    guard = [sys.executable, engine_guard.__file__, "127.0.0.1", sys.executable, "-c", CLEANED, said]
    with subprocess.Popen(guard, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 0
    assert said.read_text() == "passed over"
