"""The controller's streams to its ranks: the event loop serves all of them, and waits for none."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from launcher.controller.group import WorkerGroup
from launcher.controller.handle import Ending, Failure, RankProcess, WorkerHandle
from launcher.processes import limits
from launcher.wire import messages
from rl_megatron.errors import WorkerDied
from rl_megatron.placement.names import LEARNER

LARGE = 50_000_000
LIMIT = 300.0


class Process(RankProcess):
    """A rank that ends when its test says so, or hangs up."""

    role, node, pid = LEARNER, "here", 1

    def __init__(self, rank: int, connection: Connection, *, end: asyncio.Future[None] | None = None) -> None:
        self.rank, self.where, self.connection, self._end = rank, f"pid {rank}", connection, end

    def over(self, hung_up: asyncio.Future[None]) -> asyncio.Future[Any]:
        return self._end or hung_up

    async def ending(self) -> Ending:
        return Ending(how="was killed by signal 9", expected=False, killed=True)

    async def wake(self) -> None: ...

    def kill(self) -> None: ...


@contextlib.asynccontextmanager
async def ranks(count: int) -> AsyncIterator[tuple[WorkerGroup, list[Connection]]]:
    """Both ends of ranks' streams."""
    failure, streams = Failure(), [Pipe() for _ in range(count)]
    handles = [WorkerHandle(Process(rank, ours), failure, None) for rank, (ours, _) in enumerate(streams)]
    try:
        async with asyncio.timeout(LIMIT):
            yield WorkerGroup(handles, failure), [theirs for _, theirs in streams]
    finally:
        for _, theirs in streams:
            theirs.close()
        await asyncio.gather(*(handle.stop() for handle in handles))
    assert all(ours.closed for ours, _ in streams)


def answers(stream: Connection, value: object) -> Any:
    """Hear a call, and answer it. Returns what was heard."""
    heard = messages.unpack(messages.receive(stream))
    messages.send(stream, messages.pack(("ok", value, None)))
    return heard


async def test_a_rank_that_does_not_read_holds_up_nobody_and_its_arrays_are_not_copied() -> None:
    async with ranks(2) as (group, streams):
        array = np.zeros(LARGE, np.uint8)
        waiting = [group.workers[0].call("hold", array), group.workers[0].call("score", 1)]
        for number in range(100):
            asked = asyncio.ensure_future(group.ask("step", {1: (number,)}))
            assert await asyncio.to_thread(answers, streams[1], -number) == ("step", (number,))
            assert await asked == [-number]
        assert not waiting[0].done()
        array[-1] = 7  # still to be sent
        name, (found,) = await asyncio.to_thread(answers, streams[0], "held")
        assert (name, found.nbytes, found.sum()) == ("hold", LARGE, 7)
        assert await asyncio.to_thread(answers, streams[0], "scored") == ("score", (1,))
        assert await group.gather(waiting) == ["held", "scored"]


async def test_ranks_meet_once_none_works_alone() -> None:
    """Else the others would wait in a collective for one that samples, as long as that takes."""
    async with ranks(2) as (group, streams):
        first = group.workers[1].call("generate")
        met = asyncio.ensure_future(group.meet("durable"))
        await asyncio.to_thread(messages.receive, streams[1])
        second = group.workers[0].call("generate")  # before the first is answered
        passes = asyncio.ensure_future(group.each("backward"))
        await asyncio.sleep(0)
        messages.send(streams[1], messages.pack(("ok", "one", None)))
        heard = [[(await asyncio.to_thread(answers, streams[0], "two"))[0]], list[str]()]
        for _ in range(2):
            for stream, names in zip(streams, heard, strict=True):
                names.append((await asyncio.to_thread(answers, stream, 0))[0])
        assert heard == [["generate", "backward", "durable"], ["backward", "durable"]]
        assert (await first, await second, await passes, await met) == ("one", "two", [0, 0], [0, 0])


async def test_large_answers_of_all_ranks_arrive_between_small_ones() -> None:
    sent = np.random.default_rng(0).integers(0, 255, (4, LARGE // 4), np.uint8)
    async with ranks(4) as (group, streams):
        asked = asyncio.ensure_future(group.each("generate"))
        say = [asyncio.to_thread(answers, stream, sent[rank]) for rank, stream in enumerate(streams)]
        await asyncio.gather(*say)
        for rank, (found, stream) in enumerate(zip(await asked, streams, strict=True)):
            assert np.array_equal(found, sent[rank])
            messages.send(stream, messages.pack(("alive", (f"rank {rank}", 3), None)))
        while {worker.doing for worker in group.workers} != {f"rank {rank}" for rank in range(4)}:
            await asyncio.sleep(0)


async def test_a_rank_that_dies_with_a_large_message_half_sent_is_named_and_the_rest_is_dropped() -> None:
    async with ranks(2) as (group, streams):
        array = np.zeros(LARGE, np.uint8)
        held, asked = weakref.ref(array), [group.workers[0].call("hold", array), group.workers[1].call("hold", None)]
        del array
        await asyncio.to_thread(os.read, streams[0].fileno(), 1_000_000)
        streams[0].close()
        with pytest.raises(WorkerDied, match=r"^rank 0 \(pid 0\) was killed by signal 9$"):
            await group.gather(asked)
        group.workers[0].call("hold", np.zeros(LARGE, np.uint8))  # as of one who does not know yet
        gc.collect()
        assert held() is None


@pytest.mark.parametrize("ended", [False, True])
async def test_the_error_that_ended_a_rank_is_heard_though_its_end_is_known_first(ended: bool) -> None:
    """As when both happen while a call holds up the event loop."""
    (ours, theirs), failure = Pipe(), Failure()
    end = asyncio.get_running_loop().create_future()
    handle = WorkerHandle(Process(3, ours, end=end), failure, None)
    messages.send(theirs, messages.pack(("alive", ("backward" * 18_000, 1), None)))  # more than one turn reads
    messages.send(theirs, messages.pack(("erred", "KeyError: planted", None)))
    if ended:
        theirs.close()
    end.set_result(None)
    try:
        with pytest.raises(WorkerDied, match=r"^rank 3 \(pid 3\) raised KeyError: planted$"):
            await asyncio.wait_for(failure.known, LIMIT)
    finally:
        theirs.close()
        await handle.stop()


@pytest.fixture
def _many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits.raise_open_files()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_many_files")
async def test_384_ranks_need_no_thread() -> None:
    before = threading.active_count()
    async with ranks(384) as (group, streams):
        asked = asyncio.ensure_future(group.each("step", 1))
        while not streams[-1].poll():
            await asyncio.sleep(0)
        assert threading.active_count() == before
        for rank, stream in enumerate(streams):
            answers(stream, rank)
        assert await asked == list(range(384))
        assert threading.active_count() == before
