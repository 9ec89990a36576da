"""Processes that an environment leaves, in whatever way it started them: they end with their trajectory."""

from __future__ import annotations

import _thread
import asyncio
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_megatron.agents import playing as playing_module
from rl_megatron.agents import threads
from rl_megatron.agents.threads import AdoptedProcesses
from rl_megatron.environments import marks
from rl_megatron.environments.protocol import EnvironmentStep, Reply
from rl_megatron.environments.registry import EnvironmentFactory
from rl_megatron.types import Prompt
from tests.completions import drawn
from tests.scripted_engine import Scripted, sampler, trajectories
from tests.unit.rollout.test_environment_source import PROMPTS, Talks
from tests.unit.rollout.test_environments_that_fail import FOR_EVER, LIMIT, played


@pytest.fixture(autouse=True)
def _short_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing_module, "_CLOSE_SECONDS", 0.2)


@pytest.mark.parametrize("then", ["ends", "hangs", "is cut off"])
def test_processes_that_it_leaves_are_killed_whole(tmp_path: Path, then: str, caplog: pytest.LogCaptureFixture) -> None:
    class Forks(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            script = (
                f"sleep {FOR_EVER} & echo $! > {tmp_path}/child.tmp; mv {tmp_path}/child.tmp {tmp_path}/child; wait"
            )
            child = subprocess.Popen(["sh", "-c", script], start_new_session=True)
            while not (tmp_path / "child").exists():
                await asyncio.sleep(0.01)
            pids[:] = [child.pid, int((tmp_path / "child").read_text())]
            if then != "ends":
                await asyncio.sleep(FOR_EVER)
            return EnvironmentStep(reward=1.0)

    async def cut_off() -> None:
        playing = asyncio.ensure_future(made.groups(drawn(PROMPTS[:1], 1)))
        while len(pids) < 2:
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    pids: list[int] = []
    engine = Scripted(lambda text: "a")
    keys = {"on_error": 0.0, "step_seconds": 30.0 if then == "ends" else 2.0, "group_size": 1}
    made = sampler(engine, EnvironmentFactory(Forks), **keys)
    if then == "is cut off":
        asyncio.run(asyncio.wait_for(cut_off(), LIMIT))
    else:
        found = trajectories(played(made))
        expected = [("done", 1.0) if then == "ends" else ("environment_error", 0.0)]
        assert [(one.stop, one.reward) for one in found] == expected
    assert len(pids) == 2
    assert not any(map(runs, pids))
    if then == "is cut off":  # as at the end of a run
        assert not [one for one in caplog.records if one.levelname == "WARNING" and "processes" in one.getMessage()]
        return
    assert f"left processes running, which were killed: {', '.join(map(str, pids))}" in caplog.text


def by_a_shell(command: list[str]) -> None:
    os.system(f"{shlex.join(command)} &")


def by_a_thread_that_ends(command: list[str]) -> None:
    thread = threading.Thread(target=subprocess.Popen, args=(command,))
    thread.start()
    thread.join()


def by_a_thread_that_waits(command: list[str]) -> None:
    threading.Thread(target=subprocess.run, args=(command,), daemon=True).start()


def by_a_thread_that_python_has_forgotten(command: list[str]) -> None:
    """As one is that has ended and that the kernel has not removed yet."""
    _thread.start_new_thread(subprocess.run, (command,))


def by_a_thread_in_its_last_stage(command: list[str]) -> None:
    """As the C library blocks all signals there."""

    def starts() -> None:
        child = subprocess.Popen(command)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        child.wait()

    _thread.start_new_thread(starts, ())


def as_a_daemon(command: list[str]) -> None:
    subprocess.run(["sh", "-c", f"setsid nohup {shlex.join(command)} > /dev/null 2>&1 &"], check=True)


def runs(pid: int) -> bool:
    """False for one that was killed and that its parent has not waited for yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "leave",
    [
        by_a_shell,
        by_a_thread_that_ends,
        by_a_thread_that_waits,
        by_a_thread_that_python_has_forgotten,
        by_a_thread_in_its_last_stage,
        as_a_daemon,
    ],
)
def test_processes_that_left_their_parent_are_killed_and_no_other_trajectorys(
    tmp_path: Path, leave: Callable[[list[str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    def pid_of(number: int) -> int:
        return int((tmp_path / str(number)).read_text() or 0) if (tmp_path / str(number)).exists() else 0

    async def until(seen: Callable[[], bool]) -> None:
        ends = time.monotonic() + LIMIT / 2
        while not seen():
            assert time.monotonic() < ends, (pid_of(0), pid_of(1), psutil.Process().children(), caplog.text)
            await asyncio.sleep(0.01)

    class Leaves(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            number = numbers[self.seed]
            leave(["sh", "-c", f"echo $$ > {tmp_path}/{number}; exec sleep {FOR_EVER:g}"])
            await until(lambda: pid_of(number) > 0)
            if number == 1:
                await until(lambda: f"were killed: {pid_of(0)}" in caplog.text)
                outlived.append(psutil.pid_exists(pid_of(1)))
            return EnvironmentStep(reward=1.0)

        async def start(self, task: Prompt, seed: int) -> Any:
            self.seed = seed
            return await super().start(task, seed)

    outlived = list[bool]()
    shared = subprocess.Popen(["sleep", f"{FOR_EVER:g}"])  # started by no trajectory
    ours = sampler(Scripted(lambda text: "a"), EnvironmentFactory(Leaves), group_size=2, step_seconds=LIMIT)
    numbers = {ours._place(PROMPTS[0], "step 1", number).seed: number for number in range(2)}
    assert {one.stop for one in trajectories(played(ours))} == {"done"}
    assert outlived == [True]
    assert not any(map(runs, map(pid_of, range(2))))
    assert shared.poll() is None
    shared.kill()
    shared.wait()


def test_a_thread_that_was_seen_with_all_signals_blocked_still_has_its_processes_found() -> None:
    seen, left = threading.Event(), list[subprocess.Popen[bytes]]()
    blocked, started = threading.Event(), threading.Event()

    def starts() -> None:
        marks.mark(7)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        blocked.set()
        assert seen.wait(LIMIT)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        left.append(subprocess.Popen(["sleep", f"{FOR_EVER:g}"]))
        started.set()
        left[0].wait()

    thread, adopted = threading.Thread(target=starts, daemon=True), AdoptedProcesses()
    thread.start()
    assert blocked.wait(LIMIT)
    assert adopted.of(7, ()) == []
    seen.set()
    assert started.wait(LIMIT)
    assert adopted.of(7, ()) == [left[0].pid]
    assert adopted.of(8, ()) == []
    left[0].kill()
    thread.join(LIMIT)


def test_a_helper_that_ends_while_processes_are_looked_for_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = threads._Helpers()

    def began(pid: int) -> int:
        helpers._left[pid + 1000] = 1  # as another helper does in its thread
        return 1

    helpers._left[5] = 1
    monkeypatch.setattr(threads, "start_ticks", began)
    assert helpers.children() == [5]
