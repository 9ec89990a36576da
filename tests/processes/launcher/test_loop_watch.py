"""A controller whose loop is blocked for too long ends and says where; its own threads and stacks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.processes import stacks
from launcher.processes.own_thread import DedicatedThread
from launcher.processes.stacks import LoopWatch, Stack, read
from rl_megatron.config.io import load_config
from tests.e2e.processes import eventually

PROGRAM = """
import sys, time, threading
from pathlib import Path
from launcher.processes import stacks

def stand_still():
    print("up", flush=True)
    {still}

stacks.register(Path(sys.argv[1], "rank-3.txt"), silence={silence})
stacks.postpone_stack_dump()
{before}
stand_still()
"""


def write(folder: Path, *, still: str, before: str = "", silence: float = 1000.0) -> subprocess.Popen[str]:
    code = PROGRAM.format(still=still, before=before, silence=silence)
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def until_written(process: subprocess.Popen[str], folder: Path) -> Stack:
    file = folder / "rank-3.txt"
    try:
        eventually(lambda: "<module>" in file.read_text(), "the stacks")
    finally:
        process.kill()
        process.wait(30)
    stack = read(file.read_text())
    assert stack is not None
    return stack


STANDING_STILL = """
import asyncio, sys, time
from pathlib import Path
from launcher.processes.stacks import LoopWatch
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
        [sys.executable, "-c", STANDING_STILL, tmp_path], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    assert "error: the controller's event loop has been blocked for 1 s (run.watchdog_seconds): it is at" in done.stderr
    assert "in standing_still" in done.stderr
    assert "in standing_still" in (tmp_path / "controller.txt").read_text()


STALLED = """
import asyncio, os, sys
from pathlib import Path
from launcher.processes.stacks import LoopWatch
from rl_megatron.config import run
from rl_megatron.config.io import load_config
from rl_megatron.observability.files import JsonlFile

run.DISK_SECONDS = 3.0

async def controller(folder):
    stacks = os.open(folder / "controller.txt", os.O_RDWR | os.O_NONBLOCK)
    try:
        while True:
            os.write(stacks, bytes(4096))
    except BlockingIOError:
        LoopWatch(load_config("tiny_cpu", ["run.watchdog_seconds=1"]), folder)
        append = JsonlFile(folder / "metrics.jsonl").append
        await asyncio.to_thread(append, [{"step": 1}]) if sys.argv[2] == "thread" else append([{"step": 1}])

asyncio.run(controller(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_a_file_system_that_stalls_has_the_time_limit_of_disks(where: str, tmp_path: Path) -> None:
    """10 seconds. The files are pipes: nobody reads the stacks' full one, and the row's waits to be opened."""
    for name in ("controller.txt", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", STALLED, tmp_path, where], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "the controller has waited for a file for 3 s\n" in done.stderr
    assert f"the file system does not answer for {tmp_path}/metrics.jsonl" in done.stderr


HOLDING = """
import asyncio, re, sys, threading
from pathlib import Path
from launcher.processes.stacks import LoopWatch
from rl_megatron.config.io import load_config

async def controller():
    for number in range(2):
        watch = LoopWatch(load_config("tiny_cpu", ["run.watchdog_seconds=1"]), Path(sys.argv[1]))
        if number == 0:
            watch.stop()
    threading.Thread(target=reward, daemon=True).start()
    await asyncio.sleep(10_000)

def reward():
    while True:
        sum(range(10_000_000_000))  # holds Python's lock

asyncio.run(controller())
"""


def test_a_call_that_never_releases_pythons_lock_ends_it_with_the_stacks(tmp_path: Path) -> None:
    """3 seconds. No thread of Python's runs meanwhile, the watch's neither."""
    done = subprocess.run([sys.executable, "-c", HOLDING, tmp_path], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGPROF, done.stderr
    assert "in reward" in (tmp_path / "controller.txt").read_text()


def test_garbage_collections_of_a_run_skip_what_was_there_before(tmp_path: Path) -> None:
    """A full one visits every object that it does not skip, in whatever turn of the loop it begins."""
    before = [object()]

    def visited() -> bool:
        return any(one is before for one in gc.get_objects())

    async def controller() -> None:
        watch = LoopWatch(load_config("tiny_cpu", []), tmp_path)
        assert visited()
        watch.begin()
        later = [object()]
        assert not visited()
        assert any(one is later for one in gc.get_objects())
        watch.stop()
        assert visited()

    asyncio.run(controller())


# A dedicated thread runs calls in order, returns errors to their caller, and never delays the process's end.
STUCK = """
import asyncio, threading
from launcher.processes.own_thread import DedicatedThread
async def main():
    try:
        await asyncio.wait_for(DedicatedThread("stuck")(threading.Event().wait), 0.1)
    except TimeoutError:
        print("given up")
asyncio.run(main())
"""


def refuse() -> None:
    raise SystemExit("no")


async def test_calls_are_made_in_order_in_one_thread_whatever_they_raise() -> None:
    own, order = DedicatedThread("own"), list[int]()
    await asyncio.gather(*(own(order.append, i) for i in range(20)))
    assert order == list(range(20))
    with pytest.raises(SystemExit, match="no"):
        await own(refuse)
    thread = await own(threading.current_thread)
    assert thread.name == "own"
    own.close()
    await asyncio.to_thread(thread.join, 600)
    assert not thread.is_alive()


def test_a_call_that_never_ends_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=600, check=True)
    assert (done.stdout, done.stderr) == ("given up\n", "")


# Stacks as the interpreter writes them: read back, and who is behind.
def test_a_process_that_hangs_writes_its_stacks_at_the_signal(tmp_path: Path) -> None:
    process = write(tmp_path, still="time.sleep(1000)")
    process.send_signal(stacks.SIGNAL)
    assert [frame.name for frame in until_written(process, tmp_path).frames] == ["stand_still", "<module>"]


def test_and_by_itself_where_nothing_runs_in_its_interpreter(tmp_path: Path) -> None:
    """ctypes.PyDLL keeps the interpreter's lock: no thread of Python can answer."""
    process = write(tmp_path, still="ctypes.PyDLL(None).sleep(1000)", before="import ctypes", silence=1.0)
    assert "stand_still" in [frame.name for frame in until_written(process, tmp_path).frames]
