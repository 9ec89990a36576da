"""The error about a process's death includes what it printed before it died."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from launcher.processes.last_words import LastWords, end_of


def _abort(stderr: int) -> None:
    """As gloo does, from C."""
    os.dup2(stderr, 2)
    os.write(2, b"".join(b"line %d\n" % number for number in range(20)) + b"\nsocket: Too many open files")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_lines_of_a_killed_child_are_kept_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    words = LastWords("rank 0")
    child = multiprocessing.get_context("fork").Process(target=_abort, args=(words.theirs.fileno(),))
    child.start()
    words.listen()
    child.join()
    assert (
        asyncio.run(words.tail()) == "".join(f"\n  line {n}" for n in range(14, 20)) + "\n  socket: Too many open files"
    )
    assert capfd.readouterr().err.startswith("line 0\nline 1\n")


def test_the_end_of_a_log_is_told_where_it_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "rank-1.txt").write_text("x" * 100_000 + "\nwhy\n")
    assert end_of(tmp_path / "rank-1.txt").endswith("\n  why")
    assert end_of(tmp_path / "rank-2.txt") == ""
