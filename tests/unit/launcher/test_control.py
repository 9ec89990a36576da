"""The control socket of a run: who gets an answer, and what is answered to a request that is none."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.commands import engines
from launcher.control import listener
from launcher.control.address import LONGEST_LINE, address_of
from launcher.control.client import ask_run
from launcher.control.listener import Control
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.errors import ConfigError, EngineError
from tests.unit.launcher.commands import Said, status_of


async def echo(arguments: Mapping[str, Any]) -> object:
    match arguments.get("what"):
        case "refuse":
            raise EngineError("no server is left")
        case "fault":
            raise KeyError("price")
        case "long":
            return "x" * LONGEST_LINE
    return dict(arguments)


class Run:
    """A run's folder, and a loop in a thread that listens for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._up, self._loop = folder, threading.Event(), asyncio.new_event_loop()
        folder.mkdir()
        (folder / "config.yaml").touch()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._listen(),))
        self._thread.start()
        assert self._up.wait(30.0)

    async def _listen(self) -> None:
        control, self._over = Control({"engines": "this run has no engine servers"}), asyncio.Event()
        async with control.offering("echo", echo), control.listening(self.folder):
            self._up.set()
            await self._over.wait()

    def end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    @property
    def path(self) -> Path:
        return Path(address_of(self.folder).path)

    def sent(self, data: bytes) -> dict[str, Any]:
        """The answer to these bytes."""
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(self.path))
            stream.sendall(data)
            answer: dict[str, Any] = json.loads(stream.makefile("rb").readline())
            return answer


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path / "run")
    yield one
    one.end()


def test_an_answer_comes_to_its_user_from_a_place_of_that_user_alone(run: Run) -> None:
    assert ask_run(run.folder, "echo", count=2, node=None) == {"count": 2, "node": None}
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.folder / "control.json").stat().st_mode) == 0o600
    assert run.folder not in run.path.parents  # the run's folder may be on a disk without sockets


def test_what_the_run_refuses_is_the_callers_to_read(run: Run) -> None:
    for command, arguments, why in (
        ("echo", {"what": "refuse"}, "no server is left"),
        ("echo", {"what": "fault"}, "KeyError: 'price'; log.txt has its traceback"),
        ("echo", {"what": "long"}, f"the answer is longer than {LONGEST_LINE} bytes"),
        ("engines", {}, "this run has no engine servers"),
        ("other", {}, "command 'other' is not known; this run answers: echo"),
    ):
        with pytest.raises(ConfigError, match=why):
            ask_run(run.folder, command, **arguments)
    assert ask_run(run.folder, "echo", still="there") == {"still": "there"}


@pytest.mark.parametrize("data", [b"{}\n", b"[1]\n", b"\xff\n", b'{"command": "echo", "arguments": 3}\n'])
def test_a_request_of_another_form_is_refused(run: Run, data: bytes) -> None:
    assert "a request is an object with command and arguments" in run.sent(data)["error"]


def test_a_request_has_a_longest_line_and_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_READ_SECONDS", 0.05)
    why = f"a request is a line of at most {LONGEST_LINE} bytes"
    assert why in run.sent(b'{"command": ')["error"]  # and no more
    assert why in run.sent(b"x" * (2 * LONGEST_LINE))["error"]


_STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
stream = socket.socket(socket.AF_UNIX)
try:
    stream.connect(sys.argv[1])
except PermissionError:
    sys.exit("no way in")
try:
    stream.sendall(b'{"command": "echo", "arguments": {}}\\n')
    print(stream.makefile("rb").readline())
except ConnectionError:  # what it sent was not even read
    print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_answer_even_through_an_open_door(run: Run) -> None:
    def stranger() -> str:
        command = [sys.executable, "-I", "-S", "-c", _STRANGER, str(run.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600.0, cwd="/")
        return (done.stdout + done.stderr).strip()

    assert stranger() == "no way in"
    run.path.parent.chmod(0o755)
    assert stranger() == "no way in"
    run.path.chmod(0o666)
    assert stranger() == "b''"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_nothing_is_sent_to_another_user_who_listens(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys\nos.setgid(65534); os.setuid(65534)\nl = socket.socket(socket.AF_UNIX)\n"
        "l.bind(sys.argv[1]); l.listen(); print(flush=True); print(l.accept()[0].recv(100))"
    )
    door = tmp_path / "door"
    door.mkdir(mode=0o777)
    for folder in (door, *door.parents):
        folder.chmod(folder.stat().st_mode | 0o111)
    door.chmod(0o777)
    command = [sys.executable, "-I", "-S", "-c", code, str(door / "control")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as there:
        assert there.stdout is not None
        there.stdout.readline()
        (tmp_path / "config.yaml").touch()
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        (tmp_path / "control.json").write_text(json.dumps({"node": node, "path": str(door / "control")}))
        with pytest.raises(ConfigError, match=r"another user listens at .*; nothing was sent"):
            ask_run(tmp_path, "echo")
        assert there.stdout.read() == "b''\n"


async def test_a_command_that_is_at_work_ends_with_what_offers_it(tmp_path: Path) -> None:
    """Before what offers it is taken down; the socket still answers."""
    (tmp_path / "config.yaml").touch()
    ends: list[str] = []
    async with asyncio.timeout(300.0):
        control, began = Control(), asyncio.Event()

        async def lasting(arguments: Mapping[str, Any]) -> object:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ends.append("command")

        async with control.listening(tmp_path):
            async with control.offering("last", lasting):
                asking = asyncio.create_task(asyncio.to_thread(ask_run, tmp_path, "last"))
                await began.wait()
            ends.append("offer")
            with pytest.raises(ConfigError, match="the run ended before it answered"):
                await asking
            with pytest.raises(ConfigError, match="command 'last' is not known; this run answers: none"):
                await asyncio.to_thread(ask_run, tmp_path, "last")
    assert ends == ["command", "offer"]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(0, "healthy", 7), (1, "leaving", 13), (2, "gone", 0)], "server 1 is leaving with 13 completions"),
        ([(0, "healthy", 7), (3, "starting", 0), (4, "stale", 0)], "server 3 is starting; server 4 is stale"),
        ([(0, "healthy", 7)], "all its servers serve, so it waits for a push of weights"),
    ],
)
async def test_what_is_not_done_in_time_goes_on_and_what_it_waits_for_is_told(
    tmp_path: Path, rows: list[tuple[int, str, int]], why: str
) -> None:
    (tmp_path / "config.yaml").touch()
    async with asyncio.timeout(300.0):
        control, may_end, ended = Control(), asyncio.Event(), asyncio.Event()

        async def fleet(arguments: Mapping[str, Any]) -> object:
            if arguments["action"] != "list":
                await may_end.wait()
                ended.set()
            return [dict(zip(("number", "state", "completions"), row, strict=True)) for row in rows]

        async with control.listening(tmp_path), control.offering("engines", fleet):
            said = f"drop is not done after 0.01 s: {why}; it goes on, and `rl-megatron engines {tmp_path}` shows"
            with pytest.raises(ConfigError, match=said):
                await asyncio.to_thread(engines._asked, tmp_path, engines.Action.DROP, 1, None, True, 0.01)
            assert not ended.is_set()
            may_end.set()
            await ended.wait()


@pytest.mark.parametrize(
    ("action", "drain", "keys", "seconds"),
    [
        ("list", False, (), 60.0),
        ("add", False, ("rollout.server.start_seconds=100",), 100.0 + 0.8 * 500.0),
        ("drop", False, ("run.watchdog_seconds=30",), 30.0 + 120.0),
        ("drop", True, ("run.watchdog_seconds=30", "rollout.max_seconds=7"), 30.0 + 120.0 + 7.0),
        ("drop", True, (), None),
    ],
)
def test_how_long_it_is_waited_for_is_by_the_runs_own_limits(
    tmp_path: Path, action: str, drain: bool, keys: tuple[str, ...], seconds: float | None
) -> None:
    config = load_config("tiny_cpu", ("rollout=vllm", "learner.timeout_seconds=500", *keys))
    save_resolved(config, tmp_path / "config.yaml")
    assert engines.limit_of(tmp_path, engines.Action(action), drain) == seconds


def test_a_temporary_folder_with_too_long_a_path_has_the_socket_in_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux takes 107 bytes of a socket's path (unix(7)); what was made in that folder is removed."""
    long = tmp_path / ("x" * 107)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    one = Run(tmp_path / "run")
    try:
        assert one.path.parent.parent == Path("/tmp")
        assert ask_run(one.folder, "echo", still="there") == {"still": "there"}
        assert list(long.iterdir()) == []
        there = one.path.parent
    finally:
        one.end()
    assert not there.exists()


@pytest.mark.parametrize("tmp_takes_it", [True, False])
def test_a_place_that_takes_no_socket_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_takes_it: bool
) -> None:
    make = tempfile.mkdtemp

    def full(prefix: str, dir: Path | None) -> str:
        if tmp_takes_it and dir == Path("/tmp"):
            return make(prefix=prefix, dir=dir)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    one = Run(tmp_path / "run")
    try:
        if tmp_takes_it:
            assert one.path.parent.parent == Path("/tmp")
            assert ask_run(one.folder, "echo", still="there") == {"still": "there"}
        else:
            assert "the run answers no commands" in caplog.text
            with pytest.raises(ConfigError, match="no process of this run listens"):
                ask_run(one.folder, "echo")
    finally:
        one.end()


def test_a_run_that_is_not_there_is_told(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it holds no run"):
        ask_run(tmp_path, "echo")
    (run.folder / "control.json").replace(tmp_path / "left")
    with pytest.raises(ConfigError, match="no process of this run listens: it has ended, or still starts"):
        ask_run(run.folder, "echo")
    (tmp_path / "left").replace(run.folder / "control.json")
    left = (run.folder / "control.json").read_bytes()
    run.end()
    assert not (run.folder / "control.json").exists()
    (run.folder / "control.json").write_bytes(left)  # as after kill -9
    with pytest.raises(ConfigError, match="no process of this run listens"):
        ask_run(run.folder, "echo")
    (run.folder / "control.json").write_text(json.dumps({"node": "elsewhere", "path": "/x"}))
    with pytest.raises(ConfigError, match="its controller is on elsewhere: run this command there"):
        ask_run(run.folder, "echo")


SRUN = """#!/bin/sh
{ echo "$@"; env | grep -E '^(SLURM|SRUN)_'; } >"$(dirname "$0")/called"
exit 9  # no answer
"""


@pytest.mark.parametrize(
    ("command", "node"), [(("engines",), "n1"), (("profile",), "n1"), (("engines", "join"), "n1"), (("profile",), None)]
)
def test_a_command_on_another_node_is_a_step_of_the_runs_job_by_that_jobs_own_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    node: str | None,
) -> None:
    """srun knows a task as 12_3 since 23.02 alone; of the job that the command is given in it must know nothing."""
    path, of_task = os.environ["PATH"], {"JOB_ID": "14", "ARRAY_JOB_ID": "12", "ARRAY_TASK_ID": "3"}
    for name, value in of_task.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)  # salloc's shell is on no node of its job
    if node is not None:
        monkeypatch.setenv("SLURMD_NODENAME", node)
    one = Run(tmp_path / "run")
    (one.folder / "jobs").mkdir()
    (one.folder / "jobs" / "id").write_text("12_3\n")
    file = one.folder / "control.json"
    told = json.loads(file.read_bytes())
    one.end()
    file.write_text(json.dumps({**told, "node": "elsewhere"}))
    stand_in = tmp_path / "srun"
    stand_in.write_text(SRUN)
    stand_in.chmod(0o755)
    callers = {"JOB_ID": "99", "CPUS_PER_TASK": "64", "NTASKS_PER_NODE": "8", "EXPORT_ENV": "NONE"}
    for name, value in {"PATH": f"{tmp_path}:{path}", "SRUN_CPU_BIND": "none", "SLURM_CONF": "/x"}.items():
        monkeypatch.setenv(name, value)
    for name, value in callers.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "execvpe", lambda _, called, env: sys.exit(subprocess.run(called, env=env).returncode))
    asked = [command[0], str(one.folder), *command[1:]]
    monkeypatch.setattr(sys, "argv", ["rl-megatron", *asked])
    status_of(*asked)
    if node is None:
        assert "its controller is on elsewhere; run this command there" in capsys.readouterr().err
        return
    arguments, *variables = (tmp_path / "called").read_text().splitlines()
    assert arguments.startswith("--jobid=14 --overlap --nodes=1 ")
    assert variables == ["SLURM_CONF=/x"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("drop",), "drop needs the number of a server"),
        (("drop", "1", "--node", "n7"), "--node is for add, --drain for drop"),
        (("add", "--drain"), "--node is for add, --drain for drop"),
        ((), "its controller is on elsewhere; run this command there"),
    ],
)
def test_the_command_of_engines_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "control.json").write_text(json.dumps({"node": "elsewhere", "path": "/x"}))
    assert why in Said("engines", capsys)(str(tmp_path), *arguments, status=1)
