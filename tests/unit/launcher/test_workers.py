"""Both ends of a rank's stream: what counts as silence, and that the controller gets the error that ends a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import pytest

from launcher.controller.handle import Ending, Failure, WorkerHandle
from launcher.processes import limits
from launcher.wire import messages
from launcher.wire.greetings import Setup
from launcher.worker.models import RankModels
from launcher.worker.process import say_alive, telling
from rl_megatron.errors import CheckpointError, RLMegatronError, SyncError, WorkerDied


class _Process:
    """A rank's process that is no more than its stream."""

    role, rank, node, where = "policy", 0, "here", "pid 1"

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def over(self, hung_up: asyncio.Future[None]) -> asyncio.Future[Any]:
        return hung_up

    async def ending(self) -> Ending:
        return Ending(how="ended", expected=True, killed=False)

    async def wake(self) -> None: ...

    def kill(self) -> None: ...


@contextlib.asynccontextmanager
async def _a_rank() -> AsyncIterator[tuple[WorkerHandle, Connection]]:
    """Both ends of a rank's stream."""
    ours, theirs = Pipe()
    handle = WorkerHandle(_Process(ours), Failure(), None)
    try:
        yield handle, theirs
    finally:
        theirs.close()
        await handle.stop()


async def _answered(answer: asyncio.Future[Any], rank: Connection) -> None:
    await asyncio.to_thread(messages.receive, rank)
    messages.send(rank, messages.pack(("ok", None, None)))
    await answer


async def test_only_a_rank_that_was_asked_can_make_no_progress() -> None:
    """A rollout by servers or a slow reward leaves the learner's ranks without work for as long as it takes."""
    async with _a_rank() as (handle, rank):
        await _answered(handle.prepare(cast(Setup, None)), rank)
        for _ in range(1000):
            handle.tick()
        assert handle.still == 0
        assert handle.quiet == 1000
        answer = handle.call("train_step")
        handle.tick()
        assert handle.still == 1
        await _answered(answer, rank)
        handle.tick()
        assert handle.still == 0


async def test_a_large_answer_that_arrives_slowly_is_no_silence() -> None:
    def rank_sends(part: bytes) -> None:
        while part:
            part = part[os.write(rank.fileno(), part) :]

    async with _a_rank() as (handle, rank):
        await _answered(handle.prepare(cast(Setup, None)), rank)
        answer = handle.call("generate")
        await asyncio.to_thread(messages.receive, rank)
        large = b"".join(messages.parts(messages.pack(("ok", np.arange(300_000), None))))
        for first in range(0, len(large), 400_000):  # heartbeats wait behind it
            for _ in range(100):
                handle.tick()
            assert (handle.quiet, handle.still) == (100, 100)
            await asyncio.to_thread(rank_sends, large[first : first + 400_000])
            async with asyncio.timeout(20):
                while handle.quiet:
                    await asyncio.sleep(0)
            assert handle.still == 0
        assert (await answer).sum() == 300_000 * 299_999 // 2


class _Unsound(BaseException):
    """As torch's CheckpointException, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_Unsound("no space"), r"rank 0 \(pid 1\) raised .*_Unsound: no space\nTraceback"),
        (SystemExit(3), r"raised SystemExit: 3\n"),
        (EOFError("a torn file"), r"raised EOFError: a torn file\n"),
        (OSError(27, "File too large"), r"(?s)raised OSError: \[Errno 27\] File too large\n.*\(ulimit -f\)$"),
        (RuntimeError("can't start new thread"), r"(?s)raised RuntimeError.*\(ulimit -u\) or of memory"),
        (CheckpointError("learner/ is torn"), r"^learner/ is torn$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_the_controller_hears_whatever_ends_a_rank(error: BaseException, said: str) -> None:
    ours, theirs = Pipe()
    failure = Failure()
    handle = WorkerHandle(_Process(ours), failure, None)
    with telling(theirs):
        raise error
    try:
        with pytest.raises(RLMegatronError, match=said):
            await asyncio.wait_for(failure.known, 600)
    finally:
        theirs.close()
        await handle.stop()


async def test_a_dead_rank_is_named_and_not_the_push_that_it_broke() -> None:
    """The rank that waited for it may say so before the news of its end."""
    ours, theirs = Pipe()
    failure = Failure()
    handle = WorkerHandle(_Process(ours), failure, None)
    with telling(theirs):
        raise SyncError("rank 0 waited for 8 bytes from rank 1")
    try:
        while not handle._raised:
            await asyncio.sleep(0)
        failure.report(WorkerDied("rank 1 was killed by signal 9"), at_once=True)
        with pytest.raises(WorkerDied, match="killed by signal 9"):
            await asyncio.wait_for(failure.known, 600)
    finally:
        theirs.close()
        await handle.stop()


def test_a_rank_that_can_no_longer_say_that_it_lives_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def living() -> None:
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr("launcher.processes.stacks.living", living)
    ours, theirs = Pipe()
    say_alive(theirs)
    theirs.close()
    heard = []
    with contextlib.suppress(EOFError):
        while True:
            heard.append(messages.unpack(messages.receive(ours)))
    assert [status for status, *_ in heard] == ["alive", "raised"]
    assert "unable to start watchdog thread" in heard[-1][1]


def test_a_rank_answers_for_no_model_that_it_does_not_hold() -> None:
    """The policy stands for a reference that has no ranks of its own, and for nothing else."""
    rank = object.__new__(RankModels)
    rank._scorers, rank._learners = {"policy": cast(Any, "the policy")}, {}
    assert rank._scorer("reference") == "the policy"
    for ask in (rank._scorer, rank._learner):
        with pytest.raises(RLMegatronError, match="holds no 'teacher'"):
            ask("teacher")


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(64, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, before[1]))
    try:
        most = min(before[1], 1 << 20)
        assert limits.describe_open_files().endswith(f"so up to {(most - 85) // 11} ranks")
        assert limits.problem_of_files((most - 85) // 11, here=True) == ""
        assert "each of them opens about" in limits.problem_of_files((most - 85) // 11 + 1, here=True)
        assert limits.problem_of_controller(0, (most - 256) % 3, (most - 256) // 3) == ""
        assert limits.problem_of_controller(most - 257, 1, 0) == ""
        assert "or lower these keys" in limits.problem_of_controller(most - 257, 2, 0)
        assert limits.raise_open_files() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 1 << 20), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
