"""Durability of the run's JSON lines: torn tails, resumes, faults that name the line.

These tests start processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_an_appended_row_survives_kill_9_without_close(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from rl_megatron.observability.files import JsonlFile;"
        "f = JsonlFile(Path(sys.argv[1])); f.append([{'step': 7}]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == b'{"step": 7}\n'
