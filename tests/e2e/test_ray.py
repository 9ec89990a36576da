"""Ranks as Ray actors on this machine: the same run to the bit, and the same error when one dies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import Place, Run, alive, eventually
from tests.exposure import check_ray, check_secrets, check_sockets, ports_of

pytest.importorskip("ray")

SRUN = f"""#!{sys.executable}
# A head of Ray that answers nothing: it ends once it is asked, or with the run.
import json, os, socket, sys
call = json.loads(sys.stdin.readline())
listener = socket.create_server(("", call["port"]))  # Ray takes another address of this machine than loopback
kept = listener.accept()
if os.environ["HEAD"] == "dies":
    sys.exit(3)
sys.stdin.read()
"""
SERVERS = """
import asyncio, contextlib, os, signal
from pathlib import Path
import psutil
from launcher.processes.guards import Order
from launcher.hosts.ray.cluster import RayCluster
from rl_megatron.config.io import load_config

def order(what):
    here = Path.cwd()
    said = ["sh", "-c", what]
    return Order(host="127.0.0.1", command=said, environment=dict(os.environ), folder=here, log=here / "log")

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
KEYS = ("learner.ep=2", "reward.function=my_rewards:even", "train.lr_decay=none")


def ranks(run: Run) -> list[psutil.Process]:
    """Its actors' processes, which Ray names so; in no order."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "RankActor" in " ".join(child.cmdline())]


def test_actors_train_as_processes_do_and_a_dead_one_ends_the_run_by_name(place: Place) -> None:
    local = place.fork("local", *KEYS).finish()
    run = place.fork("actors", *KEYS, "run.launcher=ray", "train.steps=100000")
    run.until_row(step=7)
    (hold := place.folder / "hold").touch()  # what follows needs no steps
    rows, samples = ([one for one in part if one["step"] <= 6] for part in run.record())
    assert (rows, samples) == local.record()
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
    run.until_row(step=9)  # it trains again
    victim = ranks(run)[0]
    victim.kill()
    assert run.end() == 1
    assert f"(pid {victim.pid} on " in run.text()
    assert "hung up: it was killed, crashed or lost its node; rank-" in run.text()
    assert re.search(r"rank-\d\.txt .*^Ray: \S", run.text(), re.DOTALL | re.MULTILINE)
    assert "Traceback" not in run.text()
    eventually(lambda: not any(map(alive, started)), "Ray's processes to end")


@pytest.mark.parametrize(
    ("head", "seconds", "why"),
    [
        ("dies", 3600, r"srun ended with status 3 before Ray was up; it waited for its head at .*; ray-\*\.txt in "),
        ("is silent", 10, r"learner\.timeout_seconds=10 passed before Ray was up; it waited for its head at "),
    ],
)
def test_a_head_that_does_not_come_up_is_not_waited_for(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, seconds: int, why: str
) -> None:
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho here\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "here"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HEAD", head)
    run = place.fork(f"head-{seconds}", *KEYS, "run.launcher=ray", f"learner.timeout_seconds={seconds}")
    assert run.end() == 1  # ray.init waits twice as long for such a head as this does
    assert re.search(f"error: {why}", run.text())
    assert "Traceback" not in run.text()
    assert (run.folder / "jobs" / "7-0" / "failed_node").read_text() == "here\n"


def test_servers_in_actors_end_with_them_and_with_the_controller(tmp_path: Path) -> None:
    """Each in its own place, which is free for the next once it is gone; by SIGKILL too, no server is left.

    In the environment of ``ray job submit``, whose files another cluster has, and in a folder with packages of our
    packages' names.
    """
    for name in ("launcher", "rl_megatron"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the project')\n")
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
