"""The nodes of a job by role, by Slurm's environment or as a Ray cluster, and how servers get to theirs."""

from __future__ import annotations

import asyncio
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
import ray  # after head, which sets what it reads
from ray._private.utils import check_version_info

from launcher.build.roles import find_allocation
from launcher.hosts.ray.actors import ServerActor
from launcher.hosts.ray.cluster import RayCluster, Wait, join_cluster
from launcher.hosts.ray.node import (
    COMPLETE,
    Bundle,
    NodeCall,
    engine_node_command,
    node_command,
    options,
    shares,
    totals,
)
from launcher.hosts.sites import cpus_of_engine_node, server_sites
from launcher.hosts.slurm.allocation import Allocation
from launcher.processes.guards import Guard, GuardSpec, ServerSite, has_remote_server, start_guard
from launcher.processes.own_thread import DedicatedThread
from launcher.runs.folder import mirror_path
from launcher.wire import this_node
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.errors import ConfigError, EngineError, WorkerFailure
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import make_placement, place_ranks, placeholder_nodes
from rl_megatron.placement.seats import place_servers, server_placements
from rl_megatron.types import ParallelDims
from tests.unit.launcher.commands import program
from tests.unit.launcher.test_memory import RECIPES

SCONTROL = """#!/bin/sh
# As scontrol show hostnames: lists without brackets.
echo "$3" | tr , '\\n'
"""
SERVED = ("rollout=vllm", "run.launcher=slurm")
GPUS = ("learner.device=cuda", "learner.tp=4", "learner.ep=8", "slurm.gpus_per_node=8", "rollout.server.tp=2")
PYXIS = ("--container-image=/vllm.sqsh", "--container-mounts=/data")


def config_of(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", [*SERVED, *keys])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, in job 7 on node a1, whose own name is loopback there, as in Debian's /etc/hosts."""
    program(tmp_path / "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURMD_NODENAME", "a1"), ("SLURM_JOB_NODELIST", "a1,a2,b1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr("socket.gethostbyname", {"a1": "127.0.1.1", "a2": "10.0.0.2", "b1": "10.0.0.3"}.__getitem__)
    monkeypatch.setattr(Allocation, "address", lambda _: "10.0.0.1")
    return tmp_path / "run"


def slurm_allocation(config: RunConfig, run: Path) -> Allocation:
    allocation = Allocation.from_environment(run, config)
    assert allocation is not None
    return allocation


def test_outside_a_job_servers_are_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = config_of("rollout.server.replicas=2", "run.launcher=local")
    assert Allocation.from_environment(tmp_path, config) is None
    found = server_sites(config, None)
    assert found == [[ServerSite(num_servers=2)], [ServerSite(server_index=1, num_servers=2)]]
    assert not has_remote_server(found)
    assert mirror_path(config, tmp_path).parent.parent == Path("/dev/shm")


TURNS = ("rollout.server.colocated=true", "rollout.server.memory_fraction=0.5")


@pytest.mark.parametrize(
    ("keys", "visible", "seen"),
    [
        (("learner.dp=2", "rollout.server.replicas=2"), "0,1,2,3", [(2,), (3,)]),  # ranks have the first two
        (("rollout.server.tp=2",), "7,GPU-5a,GPU-9c", [(1, 2)]),
        (("algorithm=ppo", "roles.critic=separate"), "0,1,2", [(2,)]),  # the critic's rank has 1
        (("algorithm=ppo", "roles.critic=separate", "roles.layouts.critic.pp=2"), "0,1,2,3", [(3,)]),
        (("learner.dp=2", "rollout.server.replicas=2", *TURNS), "0,1,2,3", [(0,), (1,)]),
        (("learner.dp=2", "rollout.server.replicas=2", "rollout.server.memory_fraction=0.3"), "4,5", [(0,), (1,)]),
        (("rollout.server.memory_fraction=0.3",), "0", [(0,)]),
    ],
)
def test_servers_on_this_machine_get_gpus_of_their_own(
    keys: tuple[str, ...], visible: str, seen: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or share those of the ranks, where the configuration says how."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = config_of("run.launcher=local", "learner.device=cuda", "learner.ep=1", *keys)
    assert [site.gpus for (site,) in server_sites(config, None)] == seen


def test_too_few_gpus_of_this_machine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = config_of("run.launcher=local", "learner.device=cuda", "learner.ep=1", "rollout.server.tp=2")
    with pytest.raises(ConfigError, match=r"replicas=1 of rollout\.server\.tp=2 need 3 GPUs, and this machine has 2"):
        server_sites(config, None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_servers_over_nodes_are_refused_on_one_machine(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    keys = ("rollout.server.tp=2", "rollout.server.nodes=2", "learner.ep=1")
    with pytest.raises(ConfigError, match=r"rollout\.server\.nodes=2, but the run is on one machine; send it as a job"):
        server_sites(config_of("run.launcher=local", f"learner.device={device}", *keys), None)


def test_servers_are_shared_out_over_gpus_and_nodes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    here = config_of("run.launcher=local", "rollout.server.replicas=3")
    assert server_sites(here, None) == [[ServerSite(server_index=n, num_servers=3)] for n in range(3)]
    on_gpus = ("run.launcher=local", "learner.device=cuda", "learner.dp=2", "learner.ep=1")
    found = server_sites(config_of(*on_gpus, "rollout.server.replicas=3"), None)
    assert [site.gpus for (site,) in found] == [(2,), (3,), (4,)]
    with pytest.raises(ConfigError, match=r"replicas=4 of rollout\.server\.tp=1 need 6 GPUs"):
        server_sites(config_of(*on_gpus, "rollout.server.replicas=4"), None)
    config = config_of("slurm.nodes=1", "slurm.engines.nodes=2", "rollout.server.replicas=4")
    found = server_sites(config, slurm_allocation(config, run))
    assert [(site.node, site.server_index) for (site,) in found] == [("a2", 0), ("a2", 1), ("b1", 2), ("b1", 3)]


def test_like_nodes_are_cut_by_role(run: Path) -> None:
    config = config_of("slurm.nodes=2", "slurm.engines.nodes=1", "rollout.server.replicas=2", "slurm.cpus_per_task=6")
    allocation = slurm_allocation(config, run)
    assert (allocation.nodes, allocation.engine_nodes) == (("a1", "a2"), ("b1",))
    found = server_sites(config, allocation)
    assert [site.host for (site,) in found] == ["10.0.0.3"] * 2
    assert all("--nodelist=b1" in site.prefix_command for (site,) in found)
    assert all("--cpus-per-task=3" in site.prefix_command for (site,) in found)
    with contextlib.ExitStack() as stack:
        first, second = ({stack.enter_context(site.ports()) for _ in range(50)} for (site,) in found)
    assert first.isdisjoint(second)
    assert min(len(first), len(second)) > 1
    assert mirror_path(config, run).parent.parent == run
    given = config_of("slurm.nodes=2", "slurm.engines.nodes=1", "weights.folder=/fast")
    assert mirror_path(given, run).parent.parent == Path("/fast")


def test_roles_with_ranks_of_their_own_have_the_nodes_between(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("algorithm=ppo", "roles.critic=separate", "slurm.engines.nodes=1")
    allocation = slurm_allocation(config_of(*keys), run)
    assert (allocation.nodes, allocation.engine_nodes) == (("a1",), ("b1",))
    assert dict(allocation.separate) == {"critic": ("a2",)}
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1")
    allocation = slurm_allocation(config_of(*keys), run)
    with pytest.raises(ConfigError, match=r"critic: 0 nodes cannot share out tp\*cp\*dp\*pp = "):
        make_placement(config_of(*keys), allocation.separate["critic"], "critic")


def test_servers_that_share_the_learners_nodes_are_spread_over_them(run: Path) -> None:
    config = config_of(*GPUS, "learner.dp=6", "slurm.nodes=3", "rollout.server.replicas=6")
    found = server_sites(config, slurm_allocation(config, run))
    assert [site.host for (site,) in found] == ["127.0.0.1"] * 2 + ["10.0.0.2"] * 2 + ["10.0.0.3"] * 2
    assert [site.gpus for (site,) in found] == [(0, 1), (2, 3)] * 3
    assert [bool(site.prefix_command) for (site,) in found] == [False] * 2 + [True] * 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_server_of_a_recipe_has_twelve_cores_for_each_of_its_gpus(recipe: str, tmp_path: Path) -> None:
    """To which srun confines its step."""
    config = load_config(recipe, ["model.path=/models/given", "run.launcher=slurm"])
    nodes = placeholder_nodes(config)
    engines = nodes.get("engines", ())
    job = Allocation(id="7", restart=0, this_node="", nodes=nodes[LEARNER], engine_nodes=engines, folder=tmp_path)
    seats = server_placements(config, job.nodes, engines)
    assert cpus_of_engine_node(config, job, seats) == 12 * sum(len(s.gpus) for s in seats if s.node == seats[0].node)


def test_without_a_number_of_cores_no_step_is_confined(run: Path) -> None:
    """Where a cluster gives whole nodes, --cpus-per-task=1 leaves a server one core of them: it implies --exact."""
    config = config_of("slurm.engines.nodes=1")
    job, placement = slurm_allocation(config, run), make_placement(config, ("a1",))
    ((server,),) = server_sites(config, job)
    seats = server_placements(config, job.nodes, job.engine_nodes)
    steps = [
        server.prefix_command,
        node_command(config.slurm, placement, run, python="p"),
        engine_node_command(job, cpus_of_engine_node(config, job, seats), python="p"),
    ]
    assert [word for step in steps for word in step if word.startswith("--cpus-per-task")] == []


@pytest.mark.parametrize(
    ("runtime", "options", "prefix"),
    [
        ("pyxis", [*PYXIS, f"--container-workdir={Path.cwd()}", "--container-env=PYTHONPATH"], []),
        ("apptainer", [], ["apptainer", "exec", "--nv", "--bind=/data", "/vllm.sqsh"]),
    ],
)
def test_servers_run_in_their_own_container(run: Path, runtime: str, options: list[str], prefix: list[str]) -> None:
    """On this node, too, by srun; the guard is run by the image's interpreter."""
    own = ("slurm.engines.container=/vllm.sqsh", "rollout.python=/opt/python", "slurm.container_mounts=/data")
    keys = (*GPUS, "learner.dp=4", "slurm.nodes=2", "rollout.server.replicas=2")
    config = config_of(*keys, *own, f"slurm.container_runtime={runtime}")
    found = server_sites(config, slurm_allocation(config, run))
    assert [site.host for (site,) in found] == ["127.0.0.1", "10.0.0.2"]
    for (site,), node in zip(found, ("a1", "a2"), strict=True):
        assert f"--nodelist={node}" in site.prefix_command
        assert site.prefix_command[site.prefix_command.index("--mem=0") + 1 :] == (*options, *prefix)
        assert (site.python, site.gpus) == ("/opt/python", (0, 1))
    outside = server_sites(config_of(*keys), slurm_allocation(config, run))
    assert {site.python for (site,) in outside} == {sys.executable}


def test_a_server_on_two_nodes_has_their_addresses(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first node is this one, which the other cannot reach by loopback."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1,a2")
    config = config_of(*GPUS, "learner.dp=4", "slurm.nodes=2", "rollout.server.tp=8", "rollout.server.pp=2")
    (sites,) = server_sites(config, slurm_allocation(config, run))
    assert [site.host for site in sites] == ["10.0.0.1", "10.0.0.2"]
    assert [bool(site.prefix_command) for site in sites] == [False, True]
    assert has_remote_server([sites])


def test_who_has_places_on_all_nodes_starts_servers_there_by_number(run: Path) -> None:
    """As Ray does, without srun; the first is on this node, which sees its memory."""
    started = []

    async def start_at(number: int, order: GuardSpec) -> Guard:
        started.append((number, order))
        return await start_guard(order)

    config = config_of(*GPUS, "learner.dp=4", "slurm.nodes=2", "rollout.server.replicas=2")
    found = server_sites(config, slurm_allocation(config, run), start_at)
    assert [site.host for (site,) in found] == ["127.0.0.1", "10.0.0.2"]
    assert [site.gpus for (site,) in found] == [(0, 1)] * 2
    assert [site.prefix_command for (site,) in found] == [(), ()]
    ((here,),) = server_sites(config_of("run.launcher=ray"), None, start_at)
    assert not here.is_remote
    said = ["sh", "-c", "pwd; echo $GLOO_SOCKET_IFNAME; exit 7"]
    order = GuardSpec(host="127.0.0.1", command=said, environment={}, folder=run.parent, log=run.parent / "log")
    for site in (*(site for (site,) in found), here):
        assert asyncio.run(_end_of(site, order)) == "ended with status 7"
    assert started == [(0, order), (1, order), (0, order)]
    assert order.log.read_text() == f"{run.parent}\nlo\n" * 3


async def _end_of(site: ServerSite, order: GuardSpec) -> str:
    return await (await site.start(order)).wait()


def test_a_node_is_blamed_where_it_is_the_only_one(run: Path) -> None:
    allocation = slurm_allocation(config_of("slurm.nodes=2", "slurm.engines.nodes=1"), run)
    for nodes, said in ((["a1"], "a1\n"), (["a1", "a2"], "")):
        allocation.blame(nodes)
        assert (allocation.folder / "failed_node").read_text() == said


# How a Ray cluster's nodes are started: a bundle a rank and a server, bound to its node, and resources that fit.
PLACEMENT = place_ranks(ParallelDims(dp=4), ("a1", "a2"), 2)


def amounts(bundles: Mapping[str, Sequence[Bundle]], name: str) -> dict[str, list[float]]:
    return {node: [bundle.get(name, 0) for bundle in each] for node, each in bundles.items()}


def options_of(resources: Mapping[str, Bundle], node: str) -> list[str]:
    """Of Ray on a node, which has got its call over the wire."""
    call = NodeCall(head="a1", host="h", port=1, token="t", folder="/f", resources=resources, seconds=1.0)
    return options(NodeCall(**json.loads(call.line())), node, own="10.0.0.9", client_port=0)


def test_servers_on_nodes_of_their_own_hold_their_gpus() -> None:
    roles = shares(
        [PLACEMENT], place_servers(ServerSection(replicas=3, tp=4), ("b1", "b2"), 8, shared=False), is_single=True
    )
    assert amounts(roles.ranks["learner"], "CPU") == {"a1": [1, 1], "a2": [1, 1]}
    assert amounts(roles.engines, "GPU") == {"b1": [4, 4], "b2": [4]}
    assert [set(bundle) for bundle in roles.engines["b1"]] == [{"CPU", "GPU", "engine on b1"}] * 2
    given = options_of(totals(roles.engines), "b1")
    assert {"--num-cpus=2", "--num-gpus=8", '--resources={"engine on b1": 2}'} <= set(given)
    given = options_of(totals(roles.ranks["learner"]), "a2")
    assert {"--num-cpus=2", "--num-gpus=0", '--resources={"learner on a2": 2}'} <= set(given)


async def test_a_server_has_the_variables_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may have other GPUs of it for the job."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    order = GuardSpec(
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


def test_a_run_on_none_of_the_learners_nodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell of salloc, where nobody would start Ray's head."""
    program(tmp_path / "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURMD_NODENAME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1,a2,b1")
    keys = ("rollout=vllm", "slurm.nodes=2", "slurm.engines.nodes=1")
    config = load_config("tiny_cpu", [*keys, "run.launcher=ray"])
    said = r"in job 7, but this process is on \S+\. It .* one of the learner's nodes \(a1, a2\); use rl-megatron submit"
    with pytest.raises(ConfigError, match=said):
        find_allocation(config, tmp_path)
    assert find_allocation(load_config("tiny_cpu", [*keys, "run.launcher=slurm"]), tmp_path) is not None
    monkeypatch.setenv("SLURMD_NODENAME", "b1")  # of a server
    with pytest.raises(ConfigError, match=r"this process is on b1\. It needs"):
        find_allocation(config, tmp_path)
    monkeypatch.setenv("SLURMD_NODENAME", "a2")
    assert find_allocation(config, tmp_path) is not None


def test_separate_roles_have_bundles_of_their_own_on_one_node_or_on_others() -> None:
    here = [replace(PLACEMENT, role=role) for role in ("learner", "critic")]
    roles = shares([*here, replace(PLACEMENT, role="reference", nodes=("c1", "c2"))], [], is_single=False)
    has = totals(*roles.ranks.values())
    assert has["a1"] == {"CPU": 4, "learner on a1": 2, "critic on a1": 2}
    assert has["c2"] == {"CPU": 2, "reference on c2": 2}
    command = node_command(SlurmSection(), replace(PLACEMENT, role="critic"), Path("/run"), python="python")
    assert "--output=/run/ray-critic-%t.txt" in command


@pytest.mark.parametrize(("replicas", "last"), [(3, 1), (4, 2)])
def test_servers_that_share_nodes_with_ranks_have_shares_beside_them(replicas: int, last: int) -> None:
    """GPUs are counted once at most, so that neither role waits for the other's."""
    roles = shares(
        [PLACEMENT], place_servers(ServerSection(replicas=replicas), ("a1", "a2"), 2, shared=True), is_single=False
    )
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
from launcher.processes.environment import adopt_orphans
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
    monkeypatch.setattr("launcher.hosts.ray.cluster.ray", slow)
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
    monkeypatch.setattr("launcher.hosts.ray.cluster.ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    mine = f"This process on node 10.0.0.1 was started with: Ray: {ray.__version__} Python: {platform.python_version()}"
    said = f"The cluster was started with: Ray: 2.1.0 Python: 3.9.7 {mine}; use the same environment on all nodes"
    with pytest.raises(ConfigError, match=re.escape(said)):
        join_cluster(call, set(), wait)
    assert tries == [1]


def cluster_of(folder: Path, *keys: str) -> RayCluster:
    """The cluster of one machine, which does not run."""
    cluster = RayCluster(load_config("tiny_cpu", ["run.launcher=ray", *keys]), None, folder)
    cluster._own = DedicatedThread("ray of this test")
    return cluster


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (Exception("The current node timed out during startup"), WorkerFailure),
        (RuntimeError("Failed to start GCS"), WorkerFailure),
        (ray.exceptions.RaySystemError("its head is gone"), WorkerFailure),
        (ConfigError("other versions"), ConfigError),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), OSError),
        (TypeError("a fault of ours"), TypeError),
    ],
)
async def test_only_a_failed_process_is_a_death(tmp_path: Path, raised: Exception, seen: type[Exception]) -> None:
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
        with pytest.raises(WorkerFailure, match=r"has not answered in learner\.timeout_seconds=0\.02"):
            await cluster.place(list)
        await cluster.end(None)
    finally:
        answers.set()
    (warning,) = caplog.messages
    assert "an actor was not ended: Ray's head on" in warning
