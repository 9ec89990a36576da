"""The nodes of a job by role, out of the environment that Slurm makes, and how servers get to theirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from launcher.hosts.ray.node import engine_node_command, node_command
from launcher.hosts.sites import cpus_of_engine_node, sites_of
from launcher.hosts.slurm import script
from launcher.hosts.slurm.allocation import Allocation
from launcher.processes.guards import Guard, Order, start_guard
from launcher.runs.folder import mirror_path
from launcher.servers.site import Site, elsewhere
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import made_up_nodes, placement_of
from rl_megatron.placement.seats import seats_of
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
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURMD_NODENAME", "a1"), ("SLURM_JOB_NODELIST", "a1,a2,b1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    monkeypatch.setattr("socket.gethostbyname", {"a1": "127.0.1.1", "a2": "10.0.0.2", "b1": "10.0.0.3"}.__getitem__)
    monkeypatch.setattr(Allocation, "address", lambda _: "10.0.0.1")
    return tmp_path / "run"


def three_components(monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "3")
    for number, node in enumerate(nodes or ("a1", "a2", "b1")):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{number}", node)


def allocation_of(config: RunConfig, run: Path) -> Allocation:
    allocation = Allocation.this(run, config)
    assert allocation is not None
    return allocation


def test_outside_a_job_servers_are_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = config_of("rollout.server.replicas=2", "run.launcher=local")
    assert Allocation.this(tmp_path, config) is None
    found = sites_of(config, None)
    assert found == [[Site(count=2)], [Site(number=1, count=2)]]
    assert not elsewhere(found)
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
    assert [site.gpus for (site,) in sites_of(config, None)] == seen


def test_too_few_gpus_of_this_machine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = config_of("run.launcher=local", "learner.device=cuda", "learner.ep=1", "rollout.server.tp=2")
    with pytest.raises(ConfigError, match=r"replicas=1 of rollout\.server\.tp=2 need 3 GPUs, and this machine has 2"):
        sites_of(config, None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_servers_over_nodes_are_refused_on_one_machine(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    keys = ("rollout.server.tp=2", "rollout.server.nodes=2", "learner.ep=1")
    with pytest.raises(ConfigError, match=r"rollout\.server\.nodes=2, but the run is on one machine; send it as a job"):
        sites_of(config_of("run.launcher=local", f"learner.device={device}", *keys), None)


def test_servers_are_shared_out_over_gpus_and_nodes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    here = config_of("run.launcher=local", "rollout.server.replicas=3")
    assert sites_of(here, None) == [[Site(number=n, count=3)] for n in range(3)]
    on_gpus = ("run.launcher=local", "learner.device=cuda", "learner.dp=2", "learner.ep=1")
    found = sites_of(config_of(*on_gpus, "rollout.server.replicas=3"), None)
    assert [site.gpus for (site,) in found] == [(2,), (3,), (4,)]
    with pytest.raises(ConfigError, match=r"replicas=4 of rollout\.server\.tp=1 need 6 GPUs"):
        sites_of(config_of(*on_gpus, "rollout.server.replicas=4"), None)
    config = config_of("slurm.nodes=1", "slurm.engines.nodes=2", "rollout.server.replicas=4")
    found = sites_of(config, allocation_of(config, run))
    assert [(site.node, site.number) for (site,) in found] == [("a2", 0), ("a2", 1), ("b1", 2), ("b1", 3)]


def test_like_nodes_are_cut_by_role(run: Path) -> None:
    config = config_of("slurm.nodes=2", "slurm.engines.nodes=1", "rollout.server.replicas=2", "slurm.cpus_per_task=6")
    allocation = allocation_of(config, run)
    assert (allocation.nodes, allocation.engine_nodes, allocation.heterogeneous) == (("a1", "a2"), ("b1",), False)
    found = sites_of(config, allocation)
    assert [site.host for (site,) in found] == ["10.0.0.3"] * 2
    assert all("--nodelist=b1" in site.before for (site,) in found)
    assert all("--cpus-per-task=3" in site.before for (site,) in found)
    with contextlib.ExitStack() as stack:
        first, second = ({stack.enter_context(site.ports()) for _ in range(50)} for (site,) in found)
    assert first.isdisjoint(second)
    assert min(len(first), len(second)) > 1
    assert mirror_path(config, run).parent.parent == run
    given = config_of("slurm.nodes=2", "slurm.engines.nodes=1", "weights.folder=/fast")
    assert mirror_path(given, run).parent.parent == Path("/fast")


def test_roles_with_ranks_of_their_own_have_the_nodes_between(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("algorithm=ppo", "roles.critic=separate", "slurm.engines.nodes=1")
    allocation = allocation_of(config_of(*keys), run)
    assert (allocation.nodes, dict(allocation.separate), allocation.engine_nodes) == (
        ("a1",),
        {"critic": ("a2",)},
        ("b1",),
    )
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1")
    allocation = allocation_of(config_of(*keys), run)
    with pytest.raises(ConfigError, match=r"slurm\.critic\.nodes=0 cannot share out the ranks of a separate critic"):
        placement_of(config_of(*keys), allocation.separate["critic"], "critic")
    three_components(monkeypatch, "a1", "b1", "a2")
    allocation = allocation_of(config_of(*keys, "slurm.heterogeneous=true"), run)
    assert (allocation.nodes, dict(allocation.separate), allocation.engine_nodes) == (
        ("a1",),
        {"critic": ("b1",)},
        ("a2",),
    )


def test_servers_that_share_the_learners_nodes_are_spread_over_them(run: Path) -> None:
    config = config_of(*GPUS, "learner.dp=6", "slurm.nodes=3", "rollout.server.replicas=6")
    found = sites_of(config, allocation_of(config, run))
    assert [site.host for (site,) in found] == ["127.0.0.1"] * 2 + ["10.0.0.2"] * 2 + ["10.0.0.3"] * 2
    assert [site.gpus for (site,) in found] == [(0, 1), (2, 3)] * 3
    assert [bool(site.before) for (site,) in found] == [False] * 2 + [True] * 4


def test_a_component_of_its_own_is_reached_by_its_group(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "a1,a2")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "a1")  # Slurm may give both a share of one node
    keys = ("slurm.heterogeneous=true", "slurm.engines.nodes=1", "slurm.engines.cpus_per_server=9")
    config = config_of("slurm.nodes=2", *keys)
    allocation = allocation_of(config, run)
    assert (allocation.nodes, allocation.engine_nodes, allocation.heterogeneous) == (("a1", "a2"), ("a1",), True)
    ((site,),) = sites_of(config, allocation)
    assert site.host == "10.0.0.1"
    assert {"--het-group=1", "--nodelist=a1", "--cpus-per-task=9", "--overlap"} <= set(site.before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_server_of_a_recipe_has_twelve_cores_for_each_of_its_gpus(recipe: str, tmp_path: Path) -> None:
    """To which srun confines its step."""
    config = load_config(recipe, ["model.path=/models/given", "run.launcher=slurm"])
    nodes, apart = made_up_nodes(config), config.slurm.heterogeneous
    engines = nodes.get("engines", ())
    job = Allocation(
        id="7", restart=0, here="", nodes=nodes[LEARNER], engine_nodes=engines, heterogeneous=apart, folder=tmp_path
    )
    seats = seats_of(config, job.nodes, engines)
    assert cpus_of_engine_node(config, job, seats) == 12 * sum(len(s.gpus) for s in seats if s.node == seats[0].node)
    if apart:
        asked = script._component(config, "engines", len(engines))
        assert asked["tasks_per_node"] * asked["cpus_per_task"] == cpus_of_engine_node(config, job, seats)


@pytest.mark.parametrize("apart", [False, True])
def test_without_a_number_of_cores_no_step_is_confined_to_some(
    run: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """Where a cluster gives whole nodes, --cpus-per-task=1 leaves a server one core of them: it implies --exact."""
    if apart:
        three_components(monkeypatch)
    config = config_of(f"slurm.heterogeneous={apart}", "slurm.engines.nodes=1")
    job, placement = allocation_of(config, run), placement_of(config, ("a1",))
    ((server,),) = sites_of(config, job)
    seats = seats_of(config, job.nodes, job.engine_nodes)
    steps = [
        server.before,
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
def test_servers_run_in_a_container_of_their_own(
    run: Path, runtime: str, options: list[str], prefix: list[str]
) -> None:
    """On this node, too, by srun; the guard is run by the image's interpreter."""
    own = ("slurm.engines.container=/vllm.sqsh", "rollout.python=/opt/python", "slurm.container_mounts=/data")
    keys = (*GPUS, "learner.dp=4", "slurm.nodes=2", "rollout.server.replicas=2")
    config = config_of(*keys, *own, f"slurm.container_runtime={runtime}")
    found = sites_of(config, allocation_of(config, run))
    assert [site.host for (site,) in found] == ["127.0.0.1", "10.0.0.2"]
    for (site,), node in zip(found, ("a1", "a2"), strict=True):
        assert f"--nodelist={node}" in site.before
        assert site.before[site.before.index("--mem=0") + 1 :] == (*options, *prefix)
        assert (site.python, site.gpus) == ("/opt/python", (0, 1))
    outside = sites_of(config_of(*keys), allocation_of(config, run))
    assert {site.python for (site,) in outside} == {sys.executable}


def test_a_server_on_two_nodes_has_their_addresses(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first node is this one, which the other cannot reach by loopback."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a1,a2")
    config = config_of(*GPUS, "learner.dp=4", "slurm.nodes=2", "rollout.server.tp=8", "rollout.server.pp=2")
    (sites,) = sites_of(config, allocation_of(config, run))
    assert [site.host for site in sites] == ["10.0.0.1", "10.0.0.2"]
    assert [bool(site.before) for site in sites] == [False, True]
    assert elsewhere([sites])


def test_who_has_places_on_all_nodes_starts_servers_there_by_number(run: Path) -> None:
    """As Ray does, without srun; the first is on this node, which sees its memory."""
    started = []

    async def start_at(number: int, order: Order) -> Guard:
        started.append((number, order))
        return await start_guard(order)

    config = config_of(*GPUS, "learner.dp=4", "slurm.nodes=2", "rollout.server.replicas=2")
    found = sites_of(config, allocation_of(config, run), start_at)
    assert [site.host for (site,) in found] == ["127.0.0.1", "10.0.0.2"]
    assert [site.gpus for (site,) in found] == [(0, 1)] * 2
    assert [site.before for (site,) in found] == [(), ()]
    ((here,),) = sites_of(config_of("run.launcher=ray"), None, start_at)
    assert not here.away
    said = ["sh", "-c", "pwd; echo $GLOO_SOCKET_IFNAME; exit 7"]
    order = Order(host="127.0.0.1", command=said, environment={}, folder=run.parent, log=run.parent / "log")
    for site in (*(site for (site,) in found), here):
        guard = asyncio.run(_end_of(site, order))
        assert guard == "ended with status 7"
    assert started == [(0, order), (1, order), (0, order)]
    assert order.log.read_text() == f"{run.parent}\nlo\n" * 3


async def _end_of(site: Site, order: Order) -> str:
    return await (await site.start(order)).wait()


def test_a_node_is_blamed_where_it_is_the_only_one(run: Path) -> None:
    allocation = allocation_of(config_of("slurm.nodes=2", "slurm.engines.nodes=1"), run)
    for nodes, said in ((["a1"], "a1\n"), (["a1", "a2"], "")):
        allocation.blame(nodes)
        assert (allocation.folder / "failed_node").read_text() == said
