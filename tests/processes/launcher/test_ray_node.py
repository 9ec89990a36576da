"""How a Ray cluster's nodes are started: a bundle a rank and a server, bound to its node, and resources that fit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.build.roles import allocation_of
from launcher.hosts.ray.actors import ServerActor
from launcher.hosts.ray.cluster import RayCluster
from launcher.hosts.ray.head import Wait, join_cluster
from launcher.hosts.ray.node import COMPLETE, Bundle, NodeCall, node_command, options, shares, totals
from launcher.processes.guards import Order
from launcher.processes.own_thread import OwnThread
from launcher.wire.greetings import this_node
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.errors import ConfigError, EngineError, WorkerDied
from rl_megatron.placement.ranks import place
from rl_megatron.placement.seats import seat
from rl_megatron.types import ParallelDims
from tests.processes.launcher.test_seats import SCONTROL

# isort: split
import ray  # after head, which sets what it reads
from ray._private.utils import check_version_info

PLACEMENT = place(ParallelDims(dp=4), ("a1", "a2"), 2)


def amounts(bundles: Mapping[str, Sequence[Bundle]], name: str) -> dict[str, list[float]]:
    return {node: [bundle.get(name, 0) for bundle in each] for node, each in bundles.items()}


def options_of(resources: Mapping[str, Bundle], node: str) -> list[str]:
    """Of Ray on a node, which has got its call over the wire."""
    call = NodeCall(head="a1", host="h", port=1, token="t", folder="/f", resources=resources, seconds=1.0)
    return options(NodeCall(**json.loads(call.line())), node, own="10.0.0.9", client_port=0)


def test_servers_on_nodes_of_their_own_hold_their_gpus() -> None:
    seats = seat(ServerSection(replicas=3, tp=4), ("b1", "b2"), 8, shared=False)
    roles = shares([PLACEMENT], seats, alone=True)
    assert amounts(roles.ranks["learner"], "CPU") == {"a1": [1, 1], "a2": [1, 1]}
    assert amounts(roles.engines, "GPU") == {"b1": [4, 4], "b2": [4]}
    assert [set(bundle) for bundle in roles.engines["b1"]] == [{"CPU", "GPU", "engine on b1"}] * 2
    given = options_of(totals(roles.engines), "b1")
    assert {"--num-cpus=2", "--num-gpus=8", '--resources={"engine on b1": 2}'} <= set(given)
    given = options_of(totals(roles.ranks["learner"]), "a2")
    assert {"--num-cpus=2", "--num-gpus=0", '--resources={"learner on a2": 2}'} <= set(given)


async def test_a_server_has_the_variables_of_its_node_and_not_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may have other GPUs of it for the job."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    order = Order(
        host="127.0.0.1",
        command=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_GPUS"),
        environment={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_JOB_GPUS": "0,1,2,3"},
        gpus=(2, 3),
        folder=tmp_path,
        log=tmp_path / "log",
    )
    actor = ServerActor()
    await actor.start(order)
    assert await actor.wait() == "ended with status 0"
    assert order.log.read_text() == "6,7\n"


def test_a_run_that_is_on_none_of_the_learners_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell of salloc, where nobody would start Ray's head."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURMD_NODENAME", "SLURM_HET_SIZE", "SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1,a2,b1")
    keys = ("rollout=vllm", "slurm.nodes=2", "slurm.engines.nodes=1")
    config = load_config("tiny_cpu", [*keys, "run.launcher=ray"])
    said = (
        r"in job 7, but this process is on \S+, none of the learner's nodes \(a1, a2\).* use rl-megatron submit, or set"
    )
    with pytest.raises(ConfigError, match=said):
        allocation_of(config, tmp_path)
    assert allocation_of(load_config("tiny_cpu", [*keys, "run.launcher=slurm"]), tmp_path) is not None
    monkeypatch.setenv("SLURMD_NODENAME", "b1")  # of a server
    with pytest.raises(ConfigError, match="this process is on b1, none"):
        allocation_of(config, tmp_path)
    monkeypatch.setenv("SLURMD_NODENAME", "a2")
    assert allocation_of(config, tmp_path) is not None


def test_separate_roles_have_bundles_of_their_own_on_one_node_or_on_others() -> None:
    here = [replace(PLACEMENT, role=role) for role in ("learner", "critic")]
    roles = shares([*here, replace(PLACEMENT, role="reference", nodes=("c1", "c2"))], [], alone=False)
    has = totals(*roles.ranks.values())
    assert has["a1"] == {"CPU": 4, "learner on a1": 2, "critic on a1": 2}
    assert has["c2"] == {"CPU": 2, "reference on c2": 2}
    command = node_command(SlurmSection(), replace(PLACEMENT, role="critic"), Path("/run"), python="python")
    assert "--output=/run/ray-critic-%t.txt" in command


@pytest.mark.parametrize(("replicas", "last"), [(3, 1), (4, 2)])
def test_servers_that_share_nodes_with_ranks_have_shares_beside_them(replicas: int, last: int) -> None:
    """GPUs are counted once at most, so that neither role waits for the other's."""
    roles = shares([PLACEMENT], seat(ServerSection(replicas=replicas), ("a1", "a2"), 2, shared=True), alone=False)
    assert amounts(roles.engines, "GPU") == {"a1": [0, 0], "a2": [0] * last}
    has = totals(roles.ranks["learner"], roles.engines)
    assert has["a2"] == {"CPU": 2 + last, "learner on a2": 2, "engine on a2": last}
    assert "--num-gpus=0" in options_of(has, "a2")


def test_a_node_without_a_server_has_nothing_for_ray() -> None:
    assert {"--num-cpus=0", "--num-gpus=0", "--resources={}"} <= set(options_of({}, "b9"))


def test_a_folder_that_is_there_already_and_open_to_others_is_not_taken(tmp_path: Path) -> None:
    """Whoever made it could put files of their own under Ray's sockets and logs."""
    folder = tmp_path / "ray"
    folder.mkdir()
    folder.chmod(0o777)
    call = NodeCall(head="a1", host="127.0.0.1", port=1, token="t", folder=str(folder), resources={}, seconds=1.0)
    done = subprocess.run(
        [sys.executable, "-m", "launcher.hosts.ray.node"],
        input=call.line(),
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(rb"no folder of user \d+ alone", done.stderr)
    assert not [*folder.iterdir()]


HEAD = """import socket
from launcher.hosts.ray import node
def run_ray(command, *_):
    port = next(word for word in command if word.startswith("--ray-client-server-port=")).partition("=")[2]
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(port)))
node.run_ray = run_ray
node.main()
"""


def test_the_heads_ports_are_its_own_on_loopback_too_until_ray_has_them(tmp_path: Path) -> None:
    """Ray ends where another program has one of them on any address that it listens on."""
    folder = str(tmp_path / "ray")
    call = NodeCall(head=this_node(), host="127.0.0.9", port=1, token="t", folder=folder, resources={}, seconds=1.0)
    done = subprocess.run(
        [sys.executable, "-c", HEAD], input=call.line(), capture_output=True, timeout=600, check=False
    )
    assert b"Address already in use" in done.stderr, done.stderr


STARTS = """import pathlib, subprocess, sys
starts = pathlib.Path(sys.argv[1])
starts.mkdir(exist_ok=True)
count = len([*starts.iterdir()])
left = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
(starts / str(count)).write_text(str(left.pid))
print("begun", flush=True)
if count < 2:
    sys.exit(7)
left.wait()
"""
RUN = f"""import sys
from launcher.hosts.ray import node
from launcher.processes.parent import adopt_orphans
node.RAYLET_SECONDS = float(sys.argv[2])
adopt_orphans()
ray = [sys.executable, "-c", {STARTS!r}, sys.argv[1]]
sys.exit(node.run_ray(ray, {{}}, float(sys.argv[3]), node.ControllerWatch()))
"""


def started(tmp_path: Path, told: bytes, wait: float, seconds: float) -> tuple[int, list[int]]:
    """The status, and the processes that each start left. The controller tells that all nodes are there before the
    first start, or is gone after the last."""
    folder = tmp_path / "starts"
    command = [sys.executable, "-c", RUN, str(folder), str(wait), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(told)
        process.stdin.flush()
        begun = 0
        for line in process.stdout:
            begun += line == b"begun\n"
            if begun == 3:
                process.stdin.close()
                break
        status = process.wait(600)
    return status, [int((folder / str(number)).read_text()) for number in range(len([*folder.iterdir()]))]


@pytest.mark.parametrize(
    ("told", "wait", "seconds", "starts"),
    [(b"", 0.0, 3600.0, 3), (b"", 30.0, 3600.0, 1), (b"", 0.0, 0.0, 1), (COMPLETE, 0.0, 3600.0, 1)],
    ids=["slow", "ends at once", "too long", "all nodes were there"],
)
def test_a_slow_start_of_ray_is_tried_again_until_the_cluster_has_all_nodes(
    tmp_path: Path, told: bytes, wait: float, seconds: float, starts: int
) -> None:
    """Ray gives up on its raylet after 30 s, which no setting changes."""
    status, left = started(tmp_path, told, wait, seconds)
    assert len(left) == starts
    assert status == (-9 & 255 if starts == 3 else 7)
    assert not [pid for pid in left if psutil.pid_exists(pid)]


class SlowRay:
    """Ray whose raylet here registers after the minute that ray.init waits for it, and of which a node is late."""

    def __init__(self, wait: Wait) -> None:
        self.wait, self.said, self.up = wait, [wait.what], False

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **_: object) -> None:
        self.up = len(self.said) == 2
        self.said.append(self.wait.what)
        if not self.up:
            self.said[-1] = "refused"
            raise RuntimeError("No node info found")

    def cluster_resources(self) -> dict[str, float]:
        self.said.append(self.wait.what)
        return {"learner on a1": 2.0, **({"learner on a2": 2.0} if len(self.said) > 4 else {})}


def test_a_driver_waits_for_a_slow_raylet_and_a_late_node_and_knows_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    call = NodeCall(head="a1", host="h", port=1, token="t", folder="/f", resources={}, seconds=1.0)
    slow = SlowRay(Wait(what="its head"))
    monkeypatch.setattr("launcher.hosts.ray.head.ray", slow)
    join_cluster(call, {"learner on a1", "learner on a2"}, slow.wait)
    raylet = "this node's raylet, of which Ray says: No node info found"
    assert slow.said == ["its head", "refused", raylet, raylet, "nodes that have learner on a2"]
    slow.wait.given_up.set()
    join_cluster(call, {"learner on a3"}, slow.wait)  # returns: nobody waits
    slow.up = False
    with pytest.raises(RuntimeError):
        join_cluster(call, set(), slow.wait)


def test_a_driver_of_another_version_ends_at_once_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ray's own comparison, which raises what a slow raylet raises too."""
    tries = list[int]()

    def init(**_: object) -> None:
        tries.append(1)
        wait.given_up.set()
        check_version_info({"ray_version": "2.1.0", "python_version": "3.9.7"}, "node 10.0.0.1")

    call = NodeCall(head="a1", host="h", port=1, token="t", folder="/f", resources={}, seconds=1.0)
    wait = Wait(what="its head")
    monkeypatch.setattr("launcher.hosts.ray.head.ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    mine = f"This process on node 10.0.0.1 was started with: Ray: {ray.__version__} Python: {platform.python_version()}"
    said = f"The cluster was started with: Ray: 2.1.0 Python: 3.9.7 {mine}; have all nodes run one environment"
    with pytest.raises(ConfigError, match=re.escape(said)):
        join_cluster(call, set(), wait)
    assert tries == [1]


def cluster_of(folder: Path, *keys: str) -> RayCluster:
    """The cluster of one machine, which does not run."""
    cluster = RayCluster(load_config("tiny_cpu", ["run.launcher=ray", *keys]), None, folder)
    cluster._own = OwnThread("ray of this test")
    return cluster


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (Exception("The current node timed out during startup"), WorkerDied),
        (RuntimeError("Failed to start GCS"), WorkerDied),
        (ray.exceptions.RaySystemError("its head is gone"), WorkerDied),
        (ConfigError("other versions"), ConfigError),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), OSError),
        (TypeError("a fault of ours"), TypeError),
    ],
)
async def test_only_a_process_of_ray_that_fails_is_a_death(
    tmp_path: Path, raised: Exception, seen: type[Exception]
) -> None:
    """After which a job comes back: nothing else would be another at the next try."""

    async def fails() -> None:
        raise raised

    with pytest.raises(seen, match=re.escape(str(raised))) as found:
        async with contextlib.AsyncExitStack() as stack:
            await cluster_of(tmp_path)._come_up(stack, fails(), [], Wait(what="its head"))
    assert type(found.value) is seen


async def test_no_call_waits_for_ray_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where its head was stopped: the thread of all calls hangs in the first."""
    answers = threading.Event()
    monkeypatch.setattr("launcher.hosts.ray.cluster._ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(ray, "nodes", answers.wait)
    cluster = cluster_of(tmp_path, "learner.timeout_seconds=0.02")
    try:
        with pytest.raises(EngineError, match=r"Ray's head on 127.0.0.1 has not answered in 0.01 s: .*; ray-\*"):
            await cluster.ask(ray.nodes)
        with pytest.raises(WorkerDied, match=r"has not answered in learner\.timeout_seconds=0\.02"):
            await cluster.place(list)
        await cluster.end(None)
    finally:
        answers.set()
    (warning,) = caplog.messages
    assert "an actor was not ended: Ray's head on" in warning
