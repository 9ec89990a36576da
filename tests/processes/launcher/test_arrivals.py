"""All ranks of a large run connect at the same moment, and some never do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
import threading
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher import wire
from launcher.controller.arrivals import _STRANGERS, StartedRanks, arrivals
from launcher.controller.group import RankProcess
from launcher.processes import limits
from launcher.wire import Call, Hello
from rl_megatron.errors import ConfigError, WorkerFailure
from rl_megatron.placement.ranks import RankPlacement, place_ranks
from rl_megatron.types import ParallelDims
from tests.unit.launcher.commands import program

TOKEN = b"t" * wire.TOKEN_BYTES
RANKS, EACH, THREADS = 384, 8, 32
DIMS = ParallelDims(dp=RANKS)
NODES = [f"node{number}" for number in range(RANKS // EACH)]


made: list[RankProcess] = []


class Counted(RankProcess):
    """A rank that is counted once it is known."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        made.append(self)


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And both sides have the files that they need."""
    monkeypatch.setattr("launcher.controller.arrivals.RankProcess", Counted)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits.raise_open_files()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect(listener: socket.socket, ranks: Collection[int], held: dict[int, Connection]) -> threading.Thread:
    """Connect all ranks before the first is accepted; then they greet from threads, the last first. Returns the last
    of the threads, which waits for the others."""
    waiting = [(rank, socket.create_connection(listener.getsockname(), 10)) for rank in sorted(ranks, reverse=True)]

    def greet(mine: list[tuple[int, socket.socket]]) -> None:
        for rank, stream in mine:
            held[rank] = asyncio.run(wire._proven(stream, TOKEN, ours=b"rank", theirs=b"controller"))
            hello = Hello(rank=rank, node=NODES[rank // EACH], pid=rank, store="", step="", hindered="a thread")
            held[rank].send_bytes(hello.line())

    def all_greet() -> None:
        threads = [threading.Thread(target=greet, args=(waiting[i::THREADS],)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    last = threading.Thread(target=all_greet)
    last.start()
    return last


async def once_all_have_come(count: int) -> str:
    """What starts the ranks does not end. Once so many are here, the loop's clock goes to the end of every limit."""
    loop = asyncio.get_running_loop()
    late = loop.time() + 1000
    while len(made) < count or len(asyncio.all_tasks()) > 4:  # main, this, and two of _welcome, which waits
        await asyncio.sleep(0.005)
    loop.time = lambda: late  # type: ignore[method-assign]
    return await loop.create_future()


def begun(folder: Path, blamed: list[Sequence[str]], placement: RankPlacement, ended: Awaitable[str]) -> StartedRanks:
    said = f"rank-*.txt in {folder} have their output"
    return StartedRanks(
        placements=[placement], ended=ended, folder=folder, output=said, report_lost_nodes=blamed.append
    )


def call_of(listener: socket.socket, seconds: float) -> Call:
    host, port = listener.getsockname()
    return Call(host=host, port=port, token=TOKEN.hex(), seconds=seconds, threads=1, device="cpu")


def arrived(folder: Path, absent: Collection[int], blamed: list[Sequence[str]]) -> Mapping[int, RankProcess]:
    """Those that `arrivals` returns when all but the ``absent`` connect at once. Checks that every stream is whole."""
    held: dict[int, Connection] = {}
    made.clear()

    async def main() -> list[RankProcess]:
        with wire.listen("127.0.0.1", backlog=RANKS) as listener:
            last = connect(listener, set(range(RANKS)) - set(absent), held)
            started = begun(folder, blamed, place_ranks(DIMS, NODES, EACH), once_all_have_come(RANKS - len(absent)))
            try:
                return await arrivals(listener, call_of(listener, 900), started)
            finally:
                await asyncio.to_thread(last.join)

    try:
        ranks = asyncio.run(main())
        for rank in ranks:
            rank.connection.send_bytes(str(rank.rank).encode())
            assert held[rank.rank].recv_bytes() == str(rank.rank).encode()
            rank.connection.close()
        return {rank.rank: rank for rank in ranks}
    finally:
        for stream in held.values():
            stream.close()


def test_384_ranks_arrive_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, ranks = threading.active_count(), arrived(tmp_path, (), [])
    assert list(ranks) == list(range(RANKS))
    assert {rank.hello.node for rank in ranks.values()} == set(NODES)
    assert threading.active_count() <= before + 1  # of asyncio.to_thread, in this test
    assert [record.getMessage() for record in caplog.records] == [
        f"ranks on {', '.join(NODES)} start slower, each with imports of its own: a thread"
    ]


async def test_strangers_that_say_nothing_hold_up_no_rank(tmp_path: Path) -> None:
    """As many as there is room for stay, since each has 10 s to prove itself; of more the oldest are hung up on."""
    blamed: list[Sequence[str]] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(wire.listen("127.0.0.1", backlog=200))
        connected = [socket.create_connection(listener.getsockname(), 5) for _ in range(100)]
        strangers = [stack.enter_context(stranger) for stranger in connected]
        ended = asyncio.get_running_loop().create_future()
        started = begun(tmp_path, blamed, place_ranks(ParallelDims(), ["node0"], 1), ended)
        waiting = asyncio.create_task(arrivals(listener, call_of(listener, 600), started))
        for stranger in strangers[: -1 - _STRANGERS]:
            assert len(await asyncio.to_thread(stranger.recv, 100)) == wire.PROOF_BYTES
            assert await asyncio.to_thread(stranger.recv, 100) == b""
        connection, _ = await asyncio.to_thread(wire.connect, *listener.getsockname(), TOKEN, seconds=0)
        with connection:
            connection.send_bytes(Hello(rank=0, node="node0", pid=1, store="", step="").line())
            assert [rank.rank for rank in await waiting] == [0]
    assert not blamed


@pytest.mark.parametrize(
    ("absent", "named", "nodes"),
    [
        ((3, 4, 380), "rank 3, 4 on node0, rank 380 on node47", ["node0", "node47"]),
        ((8, 9, 11), "rank 8, 9, 11 on node1", ["node1"]),
    ],
)
def test_missing_ranks_are_named_by_node(tmp_path: Path, absent: tuple[int, ...], named: str, nodes: list[str]) -> None:
    blamed: list[Sequence[str]] = []
    with pytest.raises(
        WorkerFailure,
        match=rf"^learner.timeout_seconds=900 passed before {named} connected; rank-\*.txt in .* have their output$",
    ):
        arrived(tmp_path, absent, blamed)
    assert blamed == [nodes]


def test_many_missing_ranks_are_named_by_ranges(tmp_path: Path) -> None:
    rest = ", ".join(f"rank {8 * i}-{8 * i + 7} on node{i}" for i in range(2, 48))
    with pytest.raises(WorkerFailure, match=f"before rank 1, 2 on node0, rank 8-10, 12-15 on node1, {rest} connected"):
        arrived(tmp_path, set(range(RANKS)) - {0, 3, 4, 5, 6, 7, 11}, [])


def test_more_ranks_than_open_files_are_refused_before_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (RANKS + 255,) * 2)
    with pytest.raises(ConfigError, match=r"384 ranks: the controller opens about 640 files, .* is 639; .*ulimit -Hn"):
        arrived(tmp_path, set(range(RANKS)), [])


async def test_a_dead_rank_is_told_without_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network disk that hangs."""
    back = threading.Event()
    monkeypatch.setattr("launcher.controller.group.last_lines", lambda file: str(back.wait(60)))
    hello = Hello(rank=3, node="node0", pid=1, store="", step="", hindered="")
    ours, theirs = Pipe()
    with ours, theirs:
        rank = RankProcess(ours, hello, tmp_path)
        try:
            said, _ = await asyncio.wait_for(rank.ending(), 600)
        finally:
            back.set()
    assert said == "hung up: it was killed, crashed or lost its node; rank-3.txt has its output"


@pytest.mark.parametrize(
    ("scancel", "seconds", "warned"),
    [
        ('echo "$@" >"$0".said', 60.0, None),
        ("exec sleep 600", 0.05, r"rank 3 on node0 was not continued, if it was stopped: .*scancel.* timed out after"),
        ("echo away >&2; exit 1", 60.0, "was not continued, if it was stopped: scancel: status 1: away$"),
    ],
    ids=["sends it", "hangs", "fails"],
)
def test_a_rank_is_continued_by_slurm_or_that_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scancel: str,
    seconds: float,
    warned: str | None,
) -> None:
    """It is waited for, so that none is left beside a run that ends."""
    program(tmp_path / "scancel", f"#!/bin/sh\n{scancel}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("launcher.controller.group._WAKE_SECONDS", seconds)
    hello = Hello(rank=3, node="node0", pid=1, store="", step="7.2", hindered="")
    before, (ours, theirs) = psutil.Process().children(recursive=True), Pipe()
    with ours, theirs:
        asyncio.run(RankProcess(ours, hello, tmp_path).wake())
    assert set(psutil.Process().children(recursive=True)) <= set(before)
    if warned is None:
        assert (tmp_path / "scancel.said").read_text() == "--signal=CONT 7.2\n"
        assert not caplog.messages
    else:
        (said,) = caplog.messages
        assert re.search(warned, said)
