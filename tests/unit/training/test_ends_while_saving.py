"""Runs that fail while a checkpoint is being written: which of them leave it, and whose error they end with."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from rl_megatron.digests import Written
from rl_megatron.errors import CheckpointError, DataError, WorkerDied
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore
from rl_megatron.training.loop import Loop, Pace
from tests.savings import Ended, Failing, Shards


class Writing(Shards):
    """A learner whose ranks still write when its steps are made: only who waits for them finds everything written."""

    def __init__(self, problem: Exception | None = None) -> None:
        super().__init__()
        self.problem, self.asked = problem, 0

    async def save(self, folder: Path) -> Ended:
        done, outer = await super().save(folder), self

        class Later(Ended):
            async def written(self, *, wait: bool = False) -> bool:
                return wait

            async def durable(self) -> Written:
                outer.asked += 1
                if outer.problem is not None:
                    raise outer.problem
                return await super().durable()

        return Later(done.files)


def loop_of(job: Failing, folder: Path) -> Loop:
    return Loop(
        job=cast(Any, job),
        pace=Pace(steps=9, rows=1, evaluations=0, checkpoints=1),
        checkpoints=CheckpointStore(folder, keep=2, config={}),
        recorder=cast(Any, SimpleNamespace(write=AsyncMock(return_value=None))),
        stop=asyncio.Event(),
    )


def test_a_warm_start_is_on_the_disk_before_a_step_of_reinforcement(tmp_path: Path) -> None:
    job = Failing({1: WorkerDied("rank 1")}, first_step_is_saved=True)
    with pytest.raises(WorkerDied, match="rank 1"):
        asyncio.run(loop_of(job, tmp_path).run())
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000000"
    assert checkpoints.read(tmp_path / "step_000000").state.step == 0


def test_a_fault_outside_of_the_ranks_leaves_the_checkpoint_in_hand(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 7"):
        asyncio.run(loop_of(Failing({2: DataError("line 7")}, shards=Writing()), tmp_path).run())
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000001"
    assert checkpoints.read(tmp_path / "step_000001").state.step == 1


async def test_a_run_that_is_cancelled_leaves_the_checkpoint_in_hand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()  # step 2
    running = asyncio.create_task(loop_of(Failing({}, until={2: begun.set}, shards=Writing()), tmp_path).run())
    await begun.wait()
    running.cancel("another task failed")
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        await running
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000001"
    assert "another task failed); its checkpoint in hand is finished first" in caplog.text


def test_a_second_ctrl_c_waits_for_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What its signal raises ends the event loop, and asyncio then cancels every task."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    learner = Writing()
    job = Failing({}, until={2: lambda: asyncio.get_running_loop().call_soon(interrupt) and False}, shards=learner)
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        asyncio.run(loop_of(job, tmp_path).run())
    assert (checkpoints.latest(tmp_path), learner.asked) == (None, 0)
    assert "in hand" not in caplog.text


def test_ranks_that_failed_are_not_waited_for(tmp_path: Path) -> None:
    learner = Writing()
    with pytest.raises(WorkerDied, match="rank 1"):
        asyncio.run(loop_of(Failing({2: WorkerDied("rank 1")}, shards=learner), tmp_path).run())
    assert (checkpoints.latest(tmp_path), learner.asked) == (None, 0)


def test_a_save_that_fails_behind_a_runs_error_does_not_hide_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Writing(CheckpointError("the disk is full"))
    with caplog.at_level(logging.ERROR), pytest.raises(DataError, match="line 7"):
        asyncio.run(loop_of(Failing({2: DataError("line 7")}, shards=learner), tmp_path).run())
    assert f"{tmp_path}/step_000001 is not finished: CheckpointError: the disk is full" in caplog.text


def test_a_save_that_failed_is_asked_once(tmp_path: Path) -> None:
    learner = Writing(CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="the disk is full"):  # step 2's save waits for step 1's
        asyncio.run(loop_of(Failing({}, shards=learner), tmp_path).run())
    assert learner.asked == 1
    assert list(tmp_path.iterdir()) == []  # on a full disk, what is left would keep it full


@pytest.mark.parametrize("name", ["trainer.json", "manifest.json"])
def test_a_full_disk_is_told_with_the_file_and_keeps_nothing_of_the_save(tmp_path: Path, name: str) -> None:
    class Full(Shards):
        async def save(self, folder: Path) -> Ended:
            (folder.parent / name).symlink_to("/dev/full")
            return await super().save(folder)

    with pytest.raises(OSError, match=rf"No space left on device: '.*step_000001/{name}'"):
        asyncio.run(loop_of(Failing({}, shards=Full()), tmp_path).run())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [WorkerDied("rank 1"), asyncio.CancelledError()])
async def test_nobody_leaves_while_a_thread_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    go, thread, publish = threading.Event(), threading.Event(), checkpoints.publish_folder

    def when_told(work: Path, final: Path) -> None:
        thread.set()
        assert go.wait(30)
        publish(work, final)

    monkeypatch.setattr(checkpoints, "publish_folder", when_told)

    def told() -> bool:
        """Whether a thread publishes step 2, which goes on after this step."""
        if thread.is_set():
            asyncio.get_running_loop().call_soon(go.set)
        return thread.is_set()

    loop = loop_of(Failing({4: error}, until={4: told}), tmp_path)
    loop.pace = replace(loop.pace, checkpoints=2)
    try:
        with pytest.raises(type(error)):
            await loop.run()
        assert checkpoints.latest(tmp_path) == tmp_path / "step_000002"
    finally:
        go.set()


def test_a_checkpoint_has_its_name_while_the_next_step_lasts(tmp_path: Path) -> None:
    job = Failing({2: WorkerDied("rank 1")}, until={2: lambda: checkpoints.latest(tmp_path)})
    with pytest.raises(WorkerDied, match="rank 1"):
        asyncio.run(loop_of(job, tmp_path).run())
    assert checkpoints.read(tmp_path / "step_000001").state.step == 1


def test_a_save_that_failed_ends_the_run_with_the_next_step(tmp_path: Path) -> None:
    class Full(Shards):
        asked = 0

        async def save(self, folder: Path) -> Ended:
            outer = self

            class Failed(Ended):
                async def durable(self) -> Written:
                    outer.asked += 1
                    raise CheckpointError("the disk is full")

            return Failed({})

    job = Failing({}, shards=(full := Full()), until={3: lambda: loop.in_hand is None or loop.in_hand._saved.done()})
    loop = loop_of(job, tmp_path)
    loop.pace = replace(loop.pace, checkpoints=2)
    with pytest.raises(CheckpointError, match="the disk is full"):
        asyncio.run(loop.run())
    assert (job.done, full.asked) == (3, 1)
