"""The steps of a job: which nodes each role gets, and the commands that start its tasks there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.hosts.ray.node import engine_node_command, node_command
from launcher.hosts.sites import sites_of
from launcher.hosts.slurm.allocation import Allocation
from launcher.hosts.slurm.launcher import step_command
from launcher.programs import submit
from rl_megatron.errors import ConfigError, EngineError
from tests.unit.launcher.slurm_jobs import CASES, config_of


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), "/bin/python -P -m launcher.worker.node"),
        (("slurm.cpus_per_task=3",), "/bin/python -P -m launcher.worker.node"),
        (
            (
                *("slurm.container=/images/rl.sqsh", "slurm.container_mounts=/data:/data"),
                "slurm.environment.NCCL_DEBUG=INFO",
            ),
            f"--container-image=/images/rl.sqsh --container-mounts=/data:/data --container-workdir={Path.cwd()} "
            "--container-env=NCCL_DEBUG,PYTHONPATH python -P -m launcher.worker.node",
        ),
        (
            ("slurm.container=/images/rl.sif", "slurm.container_runtime=apptainer", "slurm.gpus_per_node=2"),
            "apptainer exec --nv /images/rl.sif python -P -m launcher.worker.node",
        ),
    ],
)
def test_the_step_has_a_task_a_node_in_its_container(keys: tuple[str, ...], expected: str) -> None:
    config = config_of(*keys)
    command = step_command(config.slurm, submit.checked(config).placement, python="/bin/python")
    cores = "--cpus-per-task=6 " if config.slurm.cpus_per_task else ""  # of both ranks
    assert " ".join(command) == (
        f"srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --job-name=learner {cores}--kill-on-bad-exit=1 --label "
        f"{expected}"
    )


def test_every_role_is_placed_before_the_job_is_sent() -> None:
    text = submit.checked(config_of(*CASES["heterogeneous"], "algorithm=ppo")).describe()
    assert text.splitlines() == [
        "16 ranks on 2 nodes, 8 on each",
        "  node 0: ranks 0-7",
        "  node 1: ranks 8-15",
        "  tp=4: inside a node",
        "  dp=4: across 2 nodes",
        "  ep=8: inside a node",
        "  edp=2: across 2 nodes",
        "in every rank beside the policy: critic",
        *(f"engine {i}: node {2 + i}, GPUs 0-3" for i in range(4)),
    ]


def test_separate_roles_are_placed_on_nodes_of_their_own() -> None:
    lines = submit.checked(config_of(*CASES["every_role_a_component"])).describe().splitlines()
    learner = [*("  tp=4: inside a node", "  dp=4: across 2 nodes", "  ep=8: inside a node", "  edp=2: across 2 nodes")]
    assert lines == [
        *("16 ranks on 2 nodes, 8 on each", "  node 0: ranks 0-7", "  node 1: ranks 8-15", *learner),
        *("critic: 16 ranks on 2 nodes, 8 on each", "  node 2: ranks 0-7", "  node 3: ranks 8-15", *learner),
        "reference: 16 ranks on 4 nodes, 4 on each",
        *(f"  node {4 + i}: ranks {4 * i}-{4 * i + 3}" for i in range(4)),
        *("  tp=4: inside a node", "  dp=4: across 4 nodes", "  ep=8: across 2 nodes", "  edp=2: across 2 nodes"),
        "engine 0: node 8, GPUs 0-0",
    ]


@pytest.mark.parametrize(("heterogeneous", "where"), [(False, "--nodelist=c1,c2"), (True, "--het-group=1")])
def test_the_step_of_a_separate_role_is_on_its_nodes(tmp_path: Path, heterogeneous: bool, where: str) -> None:
    allocation = Allocation(
        id="7",
        restart=0,
        here="a1",
        nodes=("a1", "a2"),
        engine_nodes=("e1",),
        heterogeneous=heterogeneous,
        folder=tmp_path,
        separate={"critic": ("c1", "c2"), "reference": ("r1", "r2")},
    )
    config = config_of(*CASES["separate_roles"])
    critic = submit.checked(config).separate[0]
    command = allocation.separate_command(step_command(config.slurm, critic, python="p"), "critic")
    assert " ".join(command) == (
        "env --unset=SLURM_GPUS_PER_NODE --unset=SLURM_NTASKS_PER_NODE --unset=SLURM_CPUS_PER_TASK "
        f"srun {where} --mem=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --job-name=critic "
        "--kill-on-bad-exit=1 --label p -P -m launcher.worker.node"
    )
    assert allocation.learner_options() == ["--het-group=0" if heterogeneous else "--nodelist=a1,a2"]
    server = " ".join(allocation.server_command(["e1"], 1))
    assert ("--het-group=3" in server) == heterogeneous
    assert "--nodelist=e1" in server


def test_a_name_without_an_address_is_asked_for_again_and_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clouds name a node that they have just made after Slurm has started the job on it."""
    allocation = Allocation(
        id="7", restart=0, here="a1", nodes=("a1", "a2"), engine_nodes=("b1",), heterogeneous=False, folder=tmp_path
    )
    config = config_of("slurm.nodes=2", "rollout=vllm", "slurm.engines.nodes=1")
    left = 2

    def late(name: str) -> str:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError("Name or service not known")
        return {"a2": "127.0.0.2", "b1": "10.0.0.3"}[name]

    monkeypatch.setattr("socket.gethostbyname", late)
    monkeypatch.setattr("launcher.hosts.slurm.allocation._LOOK_SECONDS", 0.0)
    assert [site.host for (site,) in sites_of(config, allocation)] == ["10.0.0.3"]
    left = 2
    assert allocation.address() == "127.0.0.1"  # by which this machine goes there
    left = 2
    monkeypatch.setattr("launcher.hosts.slurm.allocation._NAME_SECONDS", 0.0)
    said = "node {} of job 7 has no address here after 0 s: Name or service not known.* IPv4.*`getent ahostsv4 {}` find"
    with pytest.raises(EngineError, match=said.format("b1", "b1")):
        sites_of(config, allocation)
    with pytest.raises(ConfigError, match=said.format("a2", "a2")):
        allocation.address()


def test_a_step_with_engine_nodes_beside_it_keeps_to_the_learners(tmp_path: Path) -> None:
    common = {"id": "7", "restart": 0, "here": "a1", "nodes": ("a1", "a2"), "engine_nodes": ("b1",), "folder": tmp_path}
    cut, het = (Allocation(heterogeneous=heterogeneous, **common) for heterogeneous in (False, True))  # type: ignore[arg-type]
    placement = submit.checked(config_of("slurm.nodes=2")).placement
    slurm = config_of().slurm
    for where, expected in ((cut.learner_options(), "--nodelist=a1,a2"), (het.learner_options(), "--het-group=0")):
        assert step_command(slurm, placement, python="p", where=where)[1] == expected
        assert node_command(slurm, placement, tmp_path, python="p", where=where)[1] == expected
    server = " ".join(het.server_command(["b1"], 24))
    assert "srun --het-group=1 --overlap --nodes=1 --ntasks=1 --nodelist=b1 --cpus-per-task=24 --mem=0" in server
    assert "--het-group" not in " ".join(cut.server_command(["b1"], 24))
    assert "--nodelist=a2" in cut.server_command(["a2"], 1)
    two = replace(het, engine_nodes=("b1", "b2"))
    ray = " ".join(engine_node_command(two, 48, python="p"))
    assert "--het-group=1 --overlap --nodes=2 --ntasks=2 --nodelist=b1,b2 --cpus-per-task=48 --mem=0 " in ray
    assert ray.endswith(f"--output={tmp_path}/ray-engines-%t.txt p -P -m launcher.hosts.ray.node")
