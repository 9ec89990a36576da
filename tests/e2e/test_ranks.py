"""Ranks that are forks, that another program starts and that connect back, and that are actors of Ray, train alike to
the bit, and a dead one ends the run by name. Slurm is pretended here; tests/cluster has a real one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.build.roles import find_allocation
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from tests.e2e.processes import Place, Run, alive, eventually
from tests.exposure import check_ray, check_secrets, check_sockets, family, ports_of

SRUN = """#!/usr/bin/env bash
# As srun does for a step of one task.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
HEAD = f"""#!{sys.executable}
# A head of Ray that answers nothing: it ends once it is asked, or with the run.
import json, os, socket, sys
call = json.loads(sys.stdin.readline())
listener = socket.create_server(("", call["port"]))  # Ray takes another address of this machine than loopback
kept = listener.accept()
if os.environ["HEAD"] == "dies":
    sys.exit(3)
sys.stdin.read()
"""
BROKEN = """
import launcher.worker.learner_rank

def broken(*given):
    raise KeyError("planted")

launcher.worker.learner_rank.LearnerRank.backward = broken
"""
SERVERS = """
import asyncio, contextlib, os, signal
from pathlib import Path
import psutil
from launcher.processes.guards import GuardSpec
from launcher.hosts.ray.cluster import RayCluster
from rl_megatron.config.io import load_config

def order(what):
    here = Path.cwd()
    said = ["sh", "-c", what]
    return GuardSpec(host="127.0.0.1", command=said, environment=dict(os.environ), folder=here, log=here / "log")

def family():
    return psutil.Process().children(recursive=True)

def named(what):
    found = []
    for process in family():
        with contextlib.suppress(psutil.Error):
            found += [process] if any(what in word for word in process.cmdline()[:1]) else []
    return found

async def sleeping(count):
    while len(found := named("sleep")) != count:
        await asyncio.sleep(0.1)  # the look itself takes 0.01 s of CPU
    return found

async def main():
    config = load_config("tiny_cpu", ["rollout=vllm", "rollout.server.replicas=2", "run.launcher=ray"])
    cluster, asked = RayCluster(config, None, Path.cwd()), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    async with cluster.running():
        os.kill(os.getpid(), signal.SIGTERM)
        await asked.wait()
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)  # with Ray's handler, an alarm that aborts the process
        guard = await cluster.start_guard(0, order("echo its log; exit 5"))
        assert await guard.wait() == "ended with status 5"
        await guard.end()  # its place is free again
        guard = await cluster.start_guard(0, order("sleep 1001"))
        (server,) = await sleeping(1)
        named("ServerActor")[0].kill()
        how = await guard.wait()
        assert how.startswith("ended with its actor") and "Ray: " in how, how
        await asyncio.to_thread(server.wait, 600)
        await guard.end()
        guard = await cluster.start_guard(0, order("sleep 1002"))
        await cluster.start_guard(1, order("sleep 1003"))
        await sleeping(2)
        await guard.end()
        assert await guard.wait() == "ended with status 241"  # SIGTERM
        await sleeping(1)
        await cluster.start_guard(0, order("sleep 1004"))
        await sleeping(2)
        held = [process for actor in named("ServerActor") for process in (actor, *actor.children(recursive=True))]
        print("up", *(process.pid for process in held), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
SUBMITTED = {
    "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(
        {"runtime_env": {"working_dir": "gcs://_ray_pkg_0.zip"}, "metadata": {"job_submission_id": "raysubmit_0"}}
    ),
    "RAY_RUNTIME_ENV_HOOK": "of.the.other.cluster",
}
OUTPUT = re.compile(r"/rank-(\d+)\.txt$")
KEYS = ("learner.ep=2", "reward.function=my_rewards:even", "train.lr_decay=none", "train.steps=100000")
LAST = 6  # of the steps that are compared
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURMD_NODENAME": "here"}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The variables of a job of one node, and the two commands that a run calls."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho here\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return JOB | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def first_steps(run: Run) -> tuple[Any, ...]:
    """What it recorded of them but times."""
    return tuple([one for one in part if one["step"] <= LAST] for part in run.record())


def said_at_its_end(run: Run) -> str:
    """What a run that failed printed, which is no traceback of the controller."""
    assert run.end() == 1, run.text()
    assert "Traceback" not in run.text()
    return run.text()


@pytest.fixture(scope="module")
def local(place: Place) -> Run:
    """A run whose ranks are forks, of which one was killed."""
    run = place.fork("local", *KEYS)
    run.until_row(step=LAST + 1)
    workers, processes = run.workers(), family(run.process.pid)
    assert len(workers) == 2
    assert set(check_sockets(processes)) == {"A learner rank"}
    assert ports_of(psutil.Process(run.process.pid)) == []  # the controller, a fork as they are
    check_secrets(processes, run.folder)
    workers[1].kill()
    assert f"error: rank 1 (pid {workers[1].pid}) was killed by signal 9" in said_at_its_end(run)
    assert not any(map(alive, workers))
    return run


def test_a_dead_learner_process_ends_the_run_and_is_named(local: Run) -> None:
    assert "rank 1" in (local.folder / "log.txt").read_text()


def connected(run: Run) -> dict[int, psutil.Process]:
    """The ranks that another program started."""
    found = {}
    for process in psutil.Process(run.process.pid).children(recursive=True):
        if "launcher.worker.node" in process.cmdline() and (
            output := OUTPUT.search(os.readlink(f"/proc/{process.pid}/fd/1"))
        ):
            found[int(output[1])] = process
    return found


def test_connected_ranks_train_alike_save_for_their_job_and_are_named_when_they_die(
    place: Place, local: Run, job: Mapping[str, str], tmp_path: Path
) -> None:
    """Four starts of one run: Slurm tells the ranks alone of preemption (whether the job then comes back, its script
    asks Slurm: after scancel it does not), it tells the controller that its time is up, a rank dies, and one raises."""
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))

    def start(restart: int, *keys: str) -> tuple[Run, Path]:
        place.environment = {**job, "PYTHONPATH": path, "SLURM_RESTART_COUNT": str(restart)}
        run = place.fork("connected", *(*KEYS, "run.launcher=slurm", "checkpoint.every=0", *keys), resume=restart > 0)
        place.environment = {}
        return run, run.folder / "jobs" / f"7-{restart}"

    run, attempt = start(0)
    run.until_row(step=LAST + 1)
    both = connected(run)
    assert len(both) == 2
    for rank in both.values():
        rank.terminate()
    run.finish()
    assert "stopped and saved" in run.text()
    eventually(lambda: not any(p.is_running() for p in both.values()), "the ranks to end")
    assert first_steps(run) == first_steps(local)
    assert list(run.folder.glob("checkpoints/step_*"))
    assert not list(run.folder.glob("hf_step_*"))
    assert not (attempt / "requeue").exists()

    last = run.rows()[-1]["step"]
    run, attempt = start(1, "learner.ep=1")
    run.until_row(step=last + 1)
    run.process.send_signal(signal.SIGUSR1)
    run.finish()
    assert (attempt / "requeue").exists()
    assert not list(run.folder.glob("hf_step_*"))

    last = run.rows()[-1]["step"]
    run, attempt = start(2, "learner.ep=1")
    run.until_row(step=last + 1)
    (rank,) = connected(run).values()
    rank.kill()
    assert f"error: rank 0 (pid {rank.pid} on here) hung up" in said_at_its_end(run)
    assert (attempt / "failed_node").read_text() == "here\n"
    assert not (attempt / "requeue").exists()

    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    run, attempt = start(3, "learner.ep=1")
    assert run.end() == 1
    assert ") raised " in run.text()
    assert "KeyError: 'planted'" in run.text()
    assert attempt.is_dir()
    assert not (attempt / "failed_node").exists()  # another node would raise it too


def test_without_a_job_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match=r"run\.launcher=slurm, but this is not a Slurm job; use rl-megatron submit"):
        find_allocation(load_config("tiny_cpu", ["run.launcher=slurm"]), tmp_path)


def test_actors_train_as_processes_do_and_a_dead_one_ends_the_run_by_name(place: Place, local: Run) -> None:
    pytest.importorskip("ray")
    run = place.fork("actors", *KEYS, "run.launcher=ray")
    run.until_row(step=LAST + 1)
    (hold := place.folder / "hold").touch()  # what follows needs no steps
    assert first_steps(run) == first_steps(local)
    for each in (local, run):
        assert re.findall(r"(\d) of 2 learner ranks are ready", each.text()) == ["1", "2"]

    controller = psutil.Process(run.process.pid)
    started = controller.children(recursive=True)
    assert sum(check_sockets([controller]).values()) == len(ports_of(controller)) > 0
    assert set(check_sockets(started)) == {"A learner rank", "Ray"}
    assert check_secrets([controller, *started], run.folder)  # the cluster's
    for process in started:
        if process.name() in ("gcs_server", "raylet"):
            for port in ports_of(process):
                check_ray(port)
    hold.unlink()
    run.until_row(step=LAST + 3)  # it trains again
    ranks = [
        p for p in controller.children(recursive=True) if "RankActor" in " ".join(p.cmdline())
    ]  # as Ray names them
    (victim := ranks[0]).kill()
    text = said_at_its_end(run)
    assert f"(pid {victim.pid} on " in text
    assert "hung up: it was killed, crashed or lost its node; rank-" in text
    assert re.search(r"rank-\d\.txt .*^Ray: \S", text, re.DOTALL | re.MULTILINE)
    eventually(lambda: not any(map(alive, started)), "Ray's processes to end")


def test_a_head_that_does_not_come_up_is_not_waited_for(place: Place, job: Mapping[str, str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "srun").write_text(HEAD)
    said = {
        "dies": r"srun ended with status 3 before Ray was up; it waited for its head at .*; ray-\*\.txt in ",
        "is silent": r"learner\.timeout_seconds=10 passed before Ray was up; it waited for its head at ",
    }
    runs = {}
    for head in said:
        place.environment = {**job, "SLURM_RESTART_COUNT": "0", "HEAD": head}
        seconds = 10 if head == "is silent" else 3600
        runs[head] = place.fork(f"head-{seconds}", *KEYS, *("run.launcher=ray", f"learner.timeout_seconds={seconds}"))
    place.environment = {}
    for head, run in runs.items():  # ray.init waits twice as long for such a head as this does
        assert re.search(f"error: {said[head]}", said_at_its_end(run))
        assert (run.folder / "jobs" / "7-0" / "failed_node").read_text() == "here\n"


def test_servers_in_actors_end_with_them_and_with_the_controller(tmp_path: Path) -> None:
    """Each in its own place, which is free for the next once it is gone; by SIGKILL too, no server is left. In the
    environment of ``ray job submit``, whose files another cluster has, and in a folder with packages of our packages'
    names."""
    for name in ("launcher", "rl_megatron"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the project')\n")
    pytest.importorskip("ray")
    controller = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVERS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **SUBMITTED},
    )
    assert controller.stdout is not None
    said = iter(controller.stdout.readline, "")  # Ray says there that an actor died
    pids = next(line for line in said if line.startswith("up ")).split()[1:]
    assert (tmp_path / "log").read_text() == "its log\n"
    started = [psutil.Process(int(pid)) for pid in pids]
    assert sum("sleep" in process.cmdline()[0] for process in started) == 2
    controller.kill()
    eventually(lambda: not any(map(alive, started)), "servers to end")
    controller.stdout.close()  # Ray's agents, which look after their raylet once in a while, still have it open
    controller.wait()
