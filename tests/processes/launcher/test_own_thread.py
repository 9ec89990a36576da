"""A dedicated thread runs calls in order, returns errors to their caller, and never delays the process's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from launcher.processes.own_thread import OwnThread

STUCK = """
import asyncio, threading
from launcher.processes.own_thread import OwnThread
async def main():
    try:
        await asyncio.wait_for(OwnThread("stuck")(threading.Event().wait), 0.1)
    except TimeoutError:
        print("given up")
asyncio.run(main())
"""


def refuse() -> None:
    raise SystemExit("no")


async def test_calls_are_made_in_order_in_one_thread_whatever_they_raise() -> None:
    own, order = OwnThread("own"), list[int]()
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
