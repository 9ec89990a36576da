"""Measure what many ranks cost the controller: threads, memory, and the seconds and CPU of a call to all of them.

    python -m bench.controller_threads [--ranks 16 128 384]

Stand-in ranks are streams of one other process, which answers every call and sends a heartbeat for each rank each
second. The baseline has three threads a rank: one that writes, one that reads and one that waits for its end. Both
are measured in the same run, each in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import selectors
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from typing_extensions import override

from bench.results import parse, write
from launcher import wire
from launcher.controller.group import Failure, RankProcess, RankStream, WorkerGroup, WorkerHandle
from launcher.processes import limits
from launcher.wire import Hello

CALLS, LARGE_CALLS, LARGE = 100, 5, 1 << 20
BAR = 1.0  # seconds of a call, as a multiple of the baseline's


class Threads:
    """The baseline: a stream with threads of its own, in place of `RankStream`."""

    def __init__(self, connection: Connection, heard: Callable[[wire.Message], None], _: Callable[[], None]) -> None:
        self._connection, self._heard, self._loop = connection, heard, asyncio.get_running_loop()
        self.hung_up: asyncio.Future[None] = self._loop.create_future()
        self._ended = threading.Event()
        self._writer = ThreadPoolExecutor(1)
        for target in (self._read, self._watch):
            threading.Thread(target=target, daemon=True).start()

    def send(self, message: wire.Message) -> None:
        """Queue it for the thread that writes."""
        self._writer.submit(wire.send, self._connection, message)

    def close(self) -> None:
        """End its threads."""
        self._writer.shutdown()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._loop.call_soon_threadsafe(self._heard, wire.receive(self._connection))
        self._ended.set()

    def _watch(self) -> None:
        self._ended.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.hung_up.set_result, None)


class StandIn(RankProcess):
    """A rank that is a stream alone."""

    def __init__(self, rank: int, connection: Connection) -> None:
        super().__init__(connection, Hello(rank=rank, node="here", pid=0, store="", step=""), Path())

    @override
    async def ending(self) -> tuple[str, bool]:
        """As it should."""
        return "ended", False


def answer(streams: Sequence[Connection]) -> None:
    """Be the ranks: answer each call at once, and send heartbeats, until the controller asks to close."""
    ready, alive = wire.pack(("ok", None, None)), wire.pack(("alive", ("nothing", 0), None))
    coming = {stream.fileno(): wire.Incoming() for stream in streams}
    beside, open_ones, beat = memoryview(bytearray(1 << 16)), len(streams), time.monotonic()
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while open_ones:
            for key, _ in selector.select(0.1):
                parts, room = coming[key.fd], coming[key.fd].room
                count = os.readv(key.fd, [room, beside])
                heard = [parts.filled(min(count, len(room))), *parts.fed(beside[: max(0, count - len(room))])]
                for message in filter(None, heard):
                    name, _ = wire.unpack(message)
                    wire.send(key.fileobj, ready)  # type: ignore[arg-type]  # a Connection
                    if name == "close":
                        selector.unregister(key.fileobj)
                        open_ones -= 1
            if time.monotonic() - beat > 1:
                beat = time.monotonic()
                for key in list(selector.get_map().values()):
                    wire.send(key.fileobj, alive)  # type: ignore[arg-type]  # a Connection


def measure(kind: type[Any], ranks: int) -> dict[str, object]:
    """One row: a controller of so many ranks, with streams of a kind."""
    limits.raise_open_files()
    pipes = [multiprocessing.Pipe() for _ in range(ranks)]
    context = multiprocessing.get_context("fork")
    child = context.Process(target=answer, args=([theirs for _, theirs in pipes],))
    child.start()
    for _, theirs in pipes:
        theirs.close()
    with patch("launcher.controller.group.RankStream", kind):
        row = asyncio.run(calls([ours for ours, _ in pipes]))
    child.join()
    return {"kind": "threads" if kind is Threads else "event loop", "ranks": ranks, **row}


async def calls(streams: Sequence[Connection]) -> dict[str, object]:
    """Make small and large calls to all ranks, one after the other."""
    before, failure = threading.active_count(), Failure()
    handles = [WorkerHandle(StandIn(rank, ours), failure, None) for rank, ours in enumerate(streams)]
    group, large = WorkerGroup(handles, failure), np.zeros(LARGE, np.uint8)
    await group.call_all(
        "step", large[:8192]
    )  # threads of an executor start with its first call, and torch is imported
    threads, row = threading.active_count() - before, {}
    for name, count, argument in (("small", CALLS, 1e-6), ("large", LARGE_CALLS, large)):
        seconds, cpu = [], time.process_time()
        for _ in range(count):
            began = time.perf_counter()
            await group.call_all("step", argument)
            seconds.append(time.perf_counter() - began)
        row |= {
            f"{name}_ms": statistics.median(seconds) * 1e3,
            f"{name}_p95_ms": sorted(seconds)[int(0.95 * count)] * 1e3,
            f"{name}_cpu_ms": (time.process_time() - cpu) / count * 1e3,
        }
    await group.call_all("close")
    await asyncio.gather(*(one.stop() for one in handles))
    return {"threads": threads, **row}


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Print and write a row for each kind and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128, 384])
    args = parse(parser)
    rows = []
    for ranks in args.ranks:
        for kind in (Threads, RankStream):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                rows.append(process.submit(measure, kind, ranks).result())
            print("  ".join(f"{name} {_shown(value)}" for name, value in rows[-1].items()), flush=True)
        for size in ("small", "large"):
            ratio = rows[-1][f"{size}_ms"] / rows[-2][f"{size}_ms"]  # type: ignore[operator]  # floats
            print(f"  a {size} call takes {ratio:.2f} of the baseline's seconds (bar {BAR:g})", flush=True)
    write(args, rows)


if __name__ == "__main__":
    main()
