"""Runs that hang end at a limit, name the rank that is behind and where, and leave the stacks of all processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import psutil
import pytest

import rl_megatron.learner.megatron  # noqa: F401  as in a rank, before anything of megatron-core: it then compiles nothing
from rl_megatron.learner import trained
from tests.e2e.processes import Place, Run, alive

EVEN = "reward.function=my_rewards:even"
TWO = ("learner.ep=2", EVEN, "train.steps=100000", "warm_start.steps=0")


def stuck_hook(*_: object, **__: object) -> None:
    time.sleep(10000)


def plant() -> None:
    """In critic rank 1, what computes a loss hangs once the test says so."""
    while multiprocessing.current_process().name != "critic rank 1" or not os.path.exists("go"):
        time.sleep(0.05)
    setattr(trained, "run_loss", stuck_hook)  # noqa: B010  an assignment is none of mypy's


def plant_in_ranks() -> None:
    os.register_at_fork(after_in_child=threading.Thread(target=plant, daemon=True).start)


def stacks(run: Run) -> dict[str, str]:
    """What the processes wrote, by the name of the file."""
    return {path.name: path.read_text() for path in (run.folder / "stacks").rglob("*.txt")}


@pytest.fixture(scope="module")
def still(place: Place) -> tuple[Run, list[psutil.Process]]:
    """A run and its ranks, of which rank 1 stands still; it waits for that for half a minute, beside another run."""
    run = place.fork("still", *TWO, "learner.timeout_seconds=60")
    run.until_row(step=1)
    workers = run.workers()
    workers[1].send_signal(signal.SIGSTOP)
    return run, workers


@pytest.mark.usefixtures("still")
def test_a_rank_that_does_not_come_to_a_collective_is_named(place: Place) -> None:
    """Its rank 0 waits for it in the collective, and would be the one whose error comes first; the learner's ranks, in
    no collective of theirs, have nothing to do."""
    critic = ("algorithm=ppo", "algorithm.unfinished_reward=null", "roles.critic=separate")
    run = place.fork("behind", *TWO, *critic, "run.watchdog_seconds=10", in_nursery=plant_in_ranks)
    run.until_row(step=1)
    workers = run.workers()
    (place.folder / "go").touch()
    assert run.end() == 1
    text = run.text()
    assert f"error: critic rank 1 (pid {workers[3].pid}) makes no progress for 10 s (run.watchdog_seconds)" in text
    assert "it was in backward, call " in text
    assert "; of the critic, rank 0 waits in " in text
    assert "rank 1 is at " in text
    assert "in stuck_hook, by rl_megatron/learner/" in text
    assert "Traceback" not in text
    written = stacks(run)
    assert "in stuck_hook" in written["critic-1.txt"]
    assert "torch/distributed/distributed_c10d.py" in written["critic-0.txt"]
    assert all("_serve" in written[f"rank-{rank}.txt"] for rank in (0, 1))
    assert "in backward" in written["controller.txt"]
    assert not any(map(alive, workers))


def test_a_learner_process_that_stands_still_ends_the_run_at_the_limit(still: tuple[Run, list[psutil.Process]]) -> None:
    run, workers = still
    assert run.end() == 1
    text = run.text()
    assert f"error: rank 1 (pid {workers[1].pid}) has sent no heartbeat for 30 s" in text
    assert "; it was in " in text
    assert "Traceback" not in text
    assert not any(map(alive, workers))
    written = stacks(run)
    assert written.keys() == {"rank-0.txt", "rank-1.txt", "controller.txt"}
    assert all("_serve" in written[f"rank-{rank}.txt"] for rank in (0, 1))
