"""The error about a process's death includes what it printed before it died."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tracemalloc
from pathlib import Path

import pytest

from launcher.processes.guards import LastWords, Order, end_of, start_guard
from launcher.servers.supervisor import Started
from rl_megatron.rollout.servers.http import Server


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


async def test_a_long_log_of_a_server_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "vllm_0.log"
    with log.open("wb") as file:
        file.truncate(8 << 20)  # of days
    command = ["sh", "-c", "echo; seq -f 'line %g' 30; exit 3"]
    order = Order(host="127.0.0.1", command=command, environment={**os.environ}, folder=tmp_path, log=log)
    guard = await start_guard(order)
    await guard.wait()
    started = Started(guards=[guard], server=Server("http://here", token=None, timeout_seconds=1.0), logs=[log])
    tracemalloc.start()
    try:
        said = await started.ended()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert said.splitlines()[0] == f"http://here ended with status 3; {log} ends with:"
    assert said.splitlines()[1:] == [f"  line {number}" for number in range(11, 31)]
