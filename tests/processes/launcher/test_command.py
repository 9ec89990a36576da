"""Refusals of the system, and Ctrl-C before anything runs, give one line and no traceback.

These tests start processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import launcher


def test_a_removed_current_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && exec "$0" -m launcher train --config tiny_cpu --check'
    command = ["sh", "-c", script, sys.executable, gone]
    variables = {**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    said = f"error: the current folder, {gone}, has been removed; change to one that is there\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[3])])
    done = subprocess.run(
        [sys.executable, "-c", "from launcher.entry import main; main()"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_command_imports_no_other_and_reads_no_configuration_for_a_job_s_state() -> None:
    code = """
import sys, typer
from launcher.__main__ import app
commands = typer.main.get_command(app).commands
assert {"train", "submit", "status"} <= set(commands)
print(*(name for name in sys.modules if name.startswith("launcher.commands.")))
assert commands["status"].name == "status"
print(*(name for name in sys.modules if name.startswith("launcher.commands.")), "pydantic" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nlauncher.commands.job False\n"
