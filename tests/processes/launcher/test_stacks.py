"""Stacks as the interpreter writes them: read back, and who is behind.

These tests start processes.
"""

from __future__ import annotations

from pathlib import Path

from launcher.processes import stacks
from tests.unit.launcher.test_stacks import until_written, write


def test_a_process_that_hangs_writes_its_stacks_at_the_signal(tmp_path: Path) -> None:
    process = write(tmp_path, still="time.sleep(1000)")
    process.send_signal(stacks.SIGNAL)
    assert [frame.name for frame in until_written(process, tmp_path).frames] == ["stand_still", "<module>"]


def test_and_by_itself_where_nothing_runs_in_its_interpreter(tmp_path: Path) -> None:
    """ctypes.PyDLL keeps the interpreter's lock: no thread of Python can answer."""
    process = write(tmp_path, still="ctypes.PyDLL(None).sleep(1000)", before="import ctypes", silence=1.0)
    assert "stand_still" in [frame.name for frame in until_written(process, tmp_path).frames]
