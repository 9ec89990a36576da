"""A controller whose event loop is blocked says where, and ends if that takes too long."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.processes.loop_watch import LoopWatch, TimedLoop
from rl_megatron.config.io import load_config

STANDING_STILL = """
import asyncio, sys, time
from pathlib import Path
from launcher.processes.loop_watch import LoopWatch, TimedLoop
from rl_megatron.config.io import load_config

async def controller():
    LoopWatch(load_config("tiny_cpu", ["run.watchdog_seconds=1"]), Path(sys.argv[1]))
    standing_still()

def standing_still():
    time.sleep(10_000)

asyncio.Runner(loop_factory=TimedLoop).run(controller())
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
from launcher.processes.loop_watch import LoopWatch, TimedLoop
from rl_megatron.config.io import load_config
from rl_megatron.observability.files import JsonlFile

async def controller(folder):
    stacks = os.open(folder / "controller.txt", os.O_RDWR | os.O_NONBLOCK)
    try:
        while True:
            os.write(stacks, bytes(4096))
    except BlockingIOError:
        LoopWatch(load_config("tiny_cpu", ["run.watchdog_seconds=1", "run.watchdog_disk_seconds=3"]), folder)
        append = JsonlFile(folder / "metrics.jsonl").append
        await asyncio.to_thread(append, [{"step": 1}]) if sys.argv[2] == "thread" else append([{"step": 1}])

asyncio.Runner(loop_factory=TimedLoop).run(controller(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("loop", "event loop has been blocked for 3 s (run.watchdog_disk_seconds): it is at"),
        ("thread", "thread has waited for a file for 3 s (run.watchdog_disk_seconds)\n"),
    ],
)
def test_a_file_system_that_stalls_has_the_time_limit_of_disks(where: str, said: str, tmp_path: Path) -> None:
    """10 seconds. The files are pipes: nobody reads the stacks' full one, and the row's waits to be opened."""
    for name in ("controller.txt", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", STALLED, tmp_path, where], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"the controller's {said}" in done.stderr
    assert f"the file system does not answer for {tmp_path}/metrics.jsonl" in done.stderr


HOLDING = """
import asyncio, re, sys, threading
from pathlib import Path
from launcher.processes.loop_watch import LoopWatch, TimedLoop
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

asyncio.Runner(loop_factory=TimedLoop).run(controller())
"""


def test_a_call_that_never_releases_pythons_lock_ends_it_with_the_stacks(tmp_path: Path) -> None:
    """3 seconds. No thread of Python's runs meanwhile, the watch's neither."""
    done = subprocess.run([sys.executable, "-c", HOLDING, tmp_path], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGPROF, done.stderr
    assert "in reward" in (tmp_path / "controller.txt").read_text()


BLOCKING = """
import asyncio, logging, re, sys, threading, time
from pathlib import Path
from launcher.processes.loop_watch import LoopWatch, TimedLoop
from rl_megatron.config.io import load_config

logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)

async def controller():
    watch = LoopWatch(load_config("tiny_cpu", []), Path(sys.argv[1]))
    parsing()
    await asyncio.sleep(0.5)
    watch.begin()
    await asyncio.sleep(0.1)
    watch.row()
    for _ in range(2):
        parsing()
        await asyncio.sleep(0.1)
    print("blocked", watch.row()["loop/longest_ms"])
    thread = threading.Thread(target=reward)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.01)
    print("held", watch.row()["loop/longest_ms"])
    watch.stop()

def parsing():
    time.sleep(0.6)

def reward():
    for _ in range(3):
        re.fullmatch("(a|a)*b", "a" * BACKTRACKS)  # holds Python's lock

asyncio.Runner(loop_factory=TimedLoop).run(controller())
"""


def test_the_longest_time_without_service_is_measured_and_what_took_it_is_named_once(tmp_path: Path) -> None:
    """5 seconds. The oracle of a time is the sleep itself; of one that holds the lock, a process that only matches."""
    text = BLOCKING.replace("BACKTRACKS", str(_backtracks(1.0)))
    done = subprocess.run(
        [sys.executable, "-c", text, tmp_path], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"^(blocked|held) ([0-9.]+)$", done.stdout, re.MULTILINE))
    assert 600 <= float(said["blocked"]) < 10 * 600
    assert float(said["held"]) > 200
    lines = [line for line in done.stdout.splitlines() if line.startswith("the event loop was blocked")]
    assert len([line for line in lines if line.endswith(" in parsing")]) == 1
    assert re.search(r"\n  <string>:\d+ in parsing\n  <string>:\d+ in controller\n", done.stdout)
    assert re.search(r"\n  <string>:\d+ in reward\n", done.stdout)


def _backtracks(seconds: float) -> int:
    """Of how many letters the pattern takes about so long here: each doubles it."""
    count, took = 16, 0.0
    while took < seconds / 2:
        count += 1
        began = time.perf_counter()
        re.fullmatch("(a|a)*b", "a" * count)
        took = time.perf_counter() - began
    return count


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

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(controller())
