"""Files are replaced, and folders published and removed, completely or not at all, even if a kill interrupts.

These tests start processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.unit.test_durable import FULL, folder_with


def test_what_the_system_refuses_to_a_library_in_rust_names_the_file(tmp_path: Path) -> None:
    """As to safetensors and tokenizers, whose errors are none of Python's; by a limit in place of a full disk."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path / "x"], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "OSError: [Errno 27] File too large: 'x'"


def test_a_folder_whose_removal_is_killed_is_no_longer_there_in_part(tmp_path: Path) -> None:
    folder_with(tmp_path / "x", *(f"d{i}/f" for i in range(5)))
    code = (
        "import os, shutil, signal, sys; from pathlib import Path; from rl_megatron import durable;"
        "shutil.rmtree = lambda p: (os.remove(p / 'd0/f'), os.kill(os.getpid(), signal.SIGKILL));"
        "durable.remove_folder(Path(sys.argv[1]))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False)
    assert run.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".removing-x"]
    shutil.rmtree(tmp_path / ".removing-x")
