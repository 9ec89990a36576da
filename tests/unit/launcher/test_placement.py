"""Ranks, roles and servers on nodes, the steps of a job that start them there, and ports."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.commands import submit
from launcher.hosts.ray.node import engine_node_command, node_command
from launcher.hosts.sites import describe_steps, server_sites
from launcher.hosts.slurm.allocation import Allocation, rank_command, step_command
from launcher.preflight.checks import preflight
from launcher.processes import guards as ports
from launcher.processes.guards import any_port, free_port, held_ports
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.placement.files import file_writer_ranks
from rl_megatron.placement.ranks import group_ranks, make_placement, place_ranks, placeholder_nodes
from rl_megatron.placement.seats import local_server_placements, place_servers, server_placements, standalone_placements
from rl_megatron.types import ParallelDims
from tests.unit.launcher.slurm_jobs import CASES, config_of

SMALL = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> ParallelDims:
    tp, cp, dp, pp = (draw(SMALL) for _ in range(4))
    inner = tp * cp * dp
    etp = draw(st.sampled_from([d for d in (1, 2, 4) if inner % d == 0]))
    ep = draw(st.sampled_from([d for d in (1, 2, 4, 8) if inner % (d * etp) == 0]))
    return ParallelDims(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, dp=dp)


@given(dims=layouts())
def test_groups_are_megatrons(dims: ParallelDims) -> None:
    from megatron.core.parallel_state import RankGenerator

    dense = RankGenerator(tp=dims.tp, ep=1, dp=dims.dp, pp=dims.pp, cp=dims.cp, order="tp-cp-ep-dp-pp")
    rest = dims.tp * dims.cp * dims.dp // (dims.etp * dims.ep)
    expert = RankGenerator(tp=dims.etp, ep=dims.ep, dp=rest, pp=dims.pp, cp=1, order="tp-cp-ep-dp-pp")
    groups = group_ranks(dims)
    for kind in ("tp", "cp", "dp", "pp"):
        assert groups[kind] == dense.get_ranks(kind)
    assert (groups["etp"], groups["ep"]) == (expert.get_ranks("tp"), expert.get_ranks("ep"))
    assert groups["edp"] == expert.get_ranks("dp")


@given(dims=layouts(), each=st.sampled_from([1, 2, 4, 8]))
def test_every_rank_has_one_node_and_tensor_parallelism_stays_inside(dims: ParallelDims, each: int) -> None:
    world = dims.world_size
    nodes = [f"n{i}" for i in range(-(-world // each))]
    try:
        placement = place_ranks(dims, nodes, each)
    except ConfigError:
        assert world != each * len(nodes) or (len(nodes) > 1 and (each % dims.tp or each % dims.etp))
        return
    on = [placement.rank_node(rank) for rank in range(world)]
    assert [on.count(node) for node in nodes] == [each] * len(nodes)
    for kind in ("tp", "etp"):
        assert all(len({on[rank] for rank in group}) == 1 for group in group_ranks(dims)[kind])


def spans(text: str, *, nodes: int, each: int) -> Iterator[str]:
    dims = ParallelDims(**{k: int(v) for k, v in (pair.split("=") for pair in text.split())})
    placement = place_ranks(dims, [f"n{i}" for i in range(nodes)], each)
    yield from (f"{kind}:{count}" for kind, count in placement.spans().items())


@pytest.mark.parametrize(
    ("dims", "nodes", "each", "expected"),
    [
        ("tp=4 ep=8 dp=2", 1, 8, "tp:1 dp:1 ep:1"),
        ("tp=8 ep=16 dp=2", 2, 8, "tp:1 dp:2 ep:2"),
        ("tp=8 pp=2", 2, 8, "tp:1 pp:2 etp:1"),
        ("tp=2 pp=4 ep=8 dp=16", 16, 8, "tp:1 dp:4 pp:4 ep:1 edp:4"),
    ],
)
def test_how_far_groups_reach(dims: str, nodes: int, each: int, expected: str) -> None:
    if "etp" in expected:
        dims += " etp=8"
    assert " ".join(spans(dims, nodes=nodes, each=each)) == expected


def test_both_numbers_and_the_change_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        place_ranks(ParallelDims(tp=4, dp=1), ["a", "b"], 4)
    assert "slurm.nodes=2 * slurm.ntasks_per_node=4 = 8 tasks" in str(caught.value)
    assert "= 4 ranks; set learner.dp=2" in str(caught.value)
    with pytest.raises(ConfigError, match=r"= 3 ranks; change one of them$"):
        place_ranks(ParallelDims(dp=3), ["a", "b"], 2)
    with pytest.raises(ConfigError, match=r"learner\.tp=8 does not divide slurm\.ntasks_per_node=4"):
        place_ranks(ParallelDims(tp=8, etp=8), ["a", "b"], 4)


def test_a_person_sees_nodes_and_groups() -> None:
    text = place_ranks(ParallelDims(tp=8, ep=16, dp=16), [f"n{i}" for i in range(16)], 8).describe()
    assert text.splitlines() == [
        *("128 ranks on 16 nodes, 8 on each", "  n0: ranks 0-7", "  n1: ranks 8-15", "  ...", "  n15: ranks 120-127"),
        *("  tp=8: inside a node", "  dp=16: across 16 nodes", "  ep=16: across 2 nodes", "  edp=8: across 8 nodes"),
    ]


def test_a_domain_of_nvlink_may_hold_a_tensor_parallel_group() -> None:
    with pytest.raises(ConfigError, match=r"slurm\.ntasks_per_node=4: a tensor-parallel group would leave its node"):
        place_ranks(ParallelDims(tp=8, etp=8, dp=2), list("abcd"), 4)
    text = place_ranks(ParallelDims(tp=8, etp=8, dp=2), list("abcd"), 4, domain=2).describe()
    assert "  tp=8: across 2 nodes of one NVLink domain" in text
    assert "  dp=2: across 2 nodes of 2 NVLink domains" in text
    with pytest.raises(ConfigError, match=r"ntasks_per_node=4 \* slurm\.nvlink_nodes=2: .* leave its NVLink domain"):
        place_ranks(ParallelDims(tp=16, etp=16), list("abcd"), 4, domain=2)


@given(replicas=st.integers(1, 20), tp=st.sampled_from([1, 2, 3, 4, 8]), count=st.integers(1, 5), shared=st.booleans())
def test_servers_stay_inside_a_node_and_meet_on_no_own_gpus(replicas: int, tp: int, count: int, shared: bool) -> None:
    section, nodes = ServerSection(replicas=replicas, tp=tp), [f"n{i}" for i in range(count)]
    fits = -(-replicas // count) * tp <= 8
    try:
        seats = place_servers(section, nodes, 8, shared=shared)
    except ConfigError:
        assert not fits and not shared  # noqa: PT018
        return
    assert len(seats) == replicas
    assert [s.node for s in seats] == sorted(s.node for s in seats)
    assert all(len(s.gpus) == tp and set(s.gpus) <= set(range(8)) for s in seats)
    taken = [(s.node, gpu) for s in seats for gpu in s.gpus]
    assert shared or len(set(taken)) == len(taken)
    assert not fits or len(set(taken)) == len(taken)
    assert max(sum(s.node == node for s in seats) for node in nodes) == -(-replicas // count)
    assert all(s.gpus == () for s in place_servers(section, nodes, 0, shared=shared))


@given(
    replicas=st.integers(1, 6),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    given_nodes=st.sampled_from([None, 1, 2, 3]),
    count=st.integers(1, 6),
)
def test_servers_on_several_nodes_have_neighbouring_nodes_and_gpus_of_their_own(
    replicas: int, tp: int, pp: int, dp: int, given_nodes: int | None, count: int
) -> None:
    section = ServerSection(replicas=replicas, tp=tp, pp=pp, dp=dp, nodes=given_nodes)
    ranks, nodes = tp * pp * dp, [f"n{i}" for i in range(count)]
    span = given_nodes or math.ceil(ranks / 8)
    try:
        seats = place_servers(section, nodes, 8, shared=False)
    except ConfigError:
        fits = ranks % span == 0 and ranks // span <= 8 and count % span == 0
        fits = fits and math.ceil(replicas / (count // span)) * (ranks // span) <= 8
        assert not fits or (tp > 8 and given_nodes is None)
        return
    servers = [[s for s in seats if s.server == number] for number in range(replicas)]
    assert [s for server in servers for s in server] == list(seats)
    for server in servers:
        first = nodes.index(server[0].node)
        assert [(s.node, s.node_index) for s in server] == [(nodes[first + i], i) for i in range(span)]
        assert first % span == 0
        assert len({s.gpus for s in server}) == 1
        assert sum(len(s.gpus) for s in server) == ranks
    taken = [(s.node, gpu) for s in seats for gpu in s.gpus]
    assert len(set(taken)) == len(taken)
    assert {gpu for _, gpu in taken} <= set(range(8))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tp": 16}, r"tp=16 is more than the 8 GPUs of a node.* allow it with rollout\.server\.nodes=2"),
        ({"tp": 8, "pp": 3, "nodes": 2}, r"nodes=2 of rollout\.server\.tp=8 \* pp=3 need 12 GPUs of each node"),
        ({"tp": 3, "nodes": 2}, r"nodes=2 cannot share out rollout\.server\.tp=3 = 3 GPUs evenly"),
        ({"tp": 8, "pp": 2, "nodes": 2}, r"the servers' nodes are 3, not a multiple of it"),
        ({"replicas": 8, "tp": 4}, r"are 3 on a node, 12 GPUs of 8; lower them, or set slurm\.engines\.nodes=4$"),
    ],
)
def test_servers_that_do_not_fit_nodes_are_told(keys: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_servers(ServerSection(**keys), ("a", "b", "c"), 8, shared=False)


# One machine's servers, of which no rank has the GPUs or which have some beside the ranks.
def served(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", ["rollout=vllm", "learner.device=cuda", *keys])


@pytest.mark.parametrize(
    ("keys", "gpus", "expected"),
    [
        (("rollout.server.replicas=1",), 2, [()]),
        (("rollout.server.replicas=3", "rollout.server.tp=2"), 6, [(0, 1), (2, 3), (4, 5)]),
        (("rollout.server.replicas=3", "rollout.server.memory_fraction=0.3"), 1, [(0,)] * 3),
    ],
    ids=["one sees all", "GPUs of their own", "a shared GPU"],
)
def test_servers_without_ranks_have_all_gpus(keys: tuple[str, ...], gpus: int, expected: list[tuple[int, ...]]) -> None:
    assert [one.gpus for one in standalone_placements(served(*keys), gpus)] == expected


@pytest.mark.parametrize(
    ("keys", "gpus", "said"),
    [
        (
            ("rollout.server.tp=2",),
            4,
            "need 6 GPUs, and this machine has 4; lower them, or let 2 share a GPU by .*=0.5$",
        ),
        (("rollout.server.tp=4",), 2, "need 12 GPUs, and this machine has 2; lower them$"),
        (("rollout.server.memory_fraction=0.6",), 2, "need 3 GPUs, and this machine has 2; lower them, or let 2 share"),
    ],
)
def test_servers_without_ranks_that_have_no_room_are_refused(keys: tuple[str, ...], gpus: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        standalone_placements(served("rollout.server.replicas=3", *keys), gpus)


def test_servers_beside_ranks_need_gpus_of_their_own_for_all() -> None:
    config = served("learner.dp=2", "rollout.server.replicas=2")
    assert [one.gpus for one in local_server_placements(config, 4)] == [(2,), (3,)]
    with pytest.raises(ConfigError, match="need 4 GPUs, and this machine has 3"):
        local_server_placements(config, 3)


def test_servers_of_a_run_on_cpus_have_no_gpus() -> None:
    config = served("learner.device=cpu", "run.launcher=slurm", "run.name=cpus", "slurm.gpus_per_node=8")
    assert [one.gpus for one in server_placements(config, ("a",), ())] == [()]


# A critic and a reference in layouts of their own: their nodes, the job's request for these, and what is refused.
GIVEN = (
    *("run.name=layouts", "run.launcher=slurm", "learner.device=cuda", "learner.tp=4", "learner.ep=8"),
    *("slurm.gpus_per_node=8", "slurm.nodes=2", "learner.dp=4", "algorithm=ppo", "algorithm.kl.coefficient=0.1"),
)
APART = ("roles.critic=separate", "roles.reference=separate")
CRITIC = ("roles.layouts.critic.tp=2", "roles.layouts.critic.pp=2", "roles.layouts.critic.dp=2")
REFERENCE = ("roles.layouts.reference.tp=4", "roles.layouts.reference.dp=3")


def job_config(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", [*GIVEN, *keys])


def test_they_fill_as_many_nodes_as_they_need() -> None:
    config = job_config(*APART, *CRITIC, *REFERENCE, "roles.layouts.reference.dp=4")
    lines = submit.resolve_job(config).describe().splitlines()
    assert lines[lines.index("critic: 8 ranks on 1 nodes, 8 on each") :] == [
        *("critic: 8 ranks on 1 nodes, 8 on each", "  node 2: ranks 0-7"),
        *("  tp=2: inside a node", "  dp=2: inside a node", "  pp=2: inside a node"),
        *("  etp=2: inside a node", "  edp=2: inside a node"),
        *("reference: 16 ranks on 2 nodes, 8 on each", "  node 3: ranks 0-7", "  node 4: ranks 8-15"),
        *("  tp=4: inside a node", "  dp=4: across 2 nodes", "  etp=4: inside a node", "  edp=4: across 2 nodes"),
    ]
    script = submit.job_script(config, folder=Path("/work"), python="python", package=Path("/code"))
    assert re.findall(r"#SBATCH --(?:nodes|ntasks-per-node)=(\d+)", script) == ["5", "8"]


def test_fewer_ranks_than_gpus_may_be_on_a_node() -> None:
    fewer = job_config(*APART, *CRITIC, "slurm.nodes=4", "slurm.ntasks_per_node=4")
    assert make_placement(fewer, list("abcd")).ranks_per_node == 4
    assert make_placement(fewer, ["x", "y"], "critic").ranks_per_node == 4
    assert len(placeholder_nodes(fewer)["critic"]) == 2


def test_each_node_with_servers_has_a_whole_copy_of_the_weights_from_its_own_ranks() -> None:
    config = job_config("rollout=vllm", "rollout.server.replicas=2", "rollout.server.memory_fraction=0.3")
    assert file_writer_ranks(config) == [range(8), range(8, 16)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (CRITIC, "roles.layouts.critic, but roles.critic=learner: the critic is on the learner's ranks, in their"),
        ((*APART, "roles.layouts.policy.tp=2"), "roles.layouts.policy"),
        ((*APART, "roles.layouts.critic.vpp=2"), "vpp=2 with roles.layouts.critic.pp=1: chunks need a pipeline"),
        ((*APART, "roles.layouts.critic.pp=3"), "give the layers of each stage (roles.layouts.critic.stage_layers;"),
        (
            (*APART, "roles.layouts.critic.tp=16"),
            "roles.layouts.critic.tp=16 does not divide critic ranks on a node=8: a tensor-parallel group would leave",
        ),
        (
            (*APART, "roles.layouts.reference.dp=9"),
            "reference: 2 nodes cannot share out tp*cp*dp*pp = 1*1*9*1 = 9 ranks evenly; change a degree of roles.lay",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_the_roles_keys(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(job_config(*keys), for_job=True).raise_problems()
    assert message in str(caught.value)


# The steps of a job: which nodes each role gets, and the commands that start its tasks there.
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
    command = step_command(config.slurm, submit.resolve_job(config).placement, python="/bin/python")
    cores = "--cpus-per-task=6 " if config.slurm.cpus_per_task else ""  # of both ranks
    assert " ".join(command) == (
        f"srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --job-name=learner {cores}--kill-on-bad-exit=1 --label "
        f"{expected}"
    )


def test_every_role_is_placed_before_the_job_is_sent() -> None:
    text = submit.resolve_job(config_of(*CASES["ray_and_engine_nodes"], "algorithm=ppo")).describe()
    assert text.splitlines() == [
        *("16 ranks on 2 nodes, 8 on each", "  node 0: ranks 0-7", "  node 1: ranks 8-15", "  tp=4: inside a node"),
        *("  dp=4: across 2 nodes", "  ep=8: inside a node", "  edp=2: across 2 nodes"),
        "in every rank besides the policy: critic",
        *(f"engine {i}: node {2 + i // 2}, GPUs {4 * (i % 2)}-{4 * (i % 2) + 3}" for i in range(4)),
    ]


def test_separate_roles_are_placed_on_nodes_of_their_own() -> None:
    roles = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "roles.critic=separate", "roles.reference=separate")
    lines = submit.resolve_job(config_of(*CASES["ray_and_engine_nodes"], *roles)).describe().splitlines()
    learner = [*("  tp=4: inside a node", "  dp=4: across 2 nodes", "  ep=8: inside a node", "  edp=2: across 2 nodes")]
    assert lines == [
        *("16 ranks on 2 nodes, 8 on each", "  node 0: ranks 0-7", "  node 1: ranks 8-15", *learner),
        *("critic: 16 ranks on 2 nodes, 8 on each", "  node 2: ranks 0-7", "  node 3: ranks 8-15", *learner),
        *("reference: 16 ranks on 2 nodes, 8 on each", "  node 4: ranks 0-7", "  node 5: ranks 8-15", *learner),
        *(f"engine {i}: node {6 + i // 2}, GPUs {4 * (i % 2)}-{4 * (i % 2) + 3}" for i in range(4)),
    ]


def test_the_step_of_a_separate_role_is_on_its_nodes(tmp_path: Path) -> None:
    allocation = Allocation(
        id="7",
        restart=0,
        this_node="a1",
        nodes=("a1", "a2"),
        engine_nodes=("e1",),
        folder=tmp_path,
        separate={"critic": ("c1", "c2"), "reference": ("r1", "r2")},
    )
    config = config_of(*CASES["separate_roles"])
    critic = submit.resolve_job(config).separate[0]
    command = allocation.separate_command(step_command(config.slurm, critic, python="p"), "critic")
    assert " ".join(command) == (
        "env --unset=SLURM_GPUS_PER_NODE --unset=SLURM_NTASKS_PER_NODE --unset=SLURM_CPUS_PER_TASK "
        "srun --nodelist=c1,c2 --mem=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --job-name=critic "
        "--kill-on-bad-exit=1 --label p -P -m launcher.worker.node"
    )
    assert allocation.learner_options() == ["--nodelist=a1,a2"]
    assert "--nodelist=e1" in allocation.server_command(["e1"], 1)


def test_the_commands_of_a_job_are_known_before_it_is_sent() -> None:
    """Those that the job runs on such nodes, but without its environment, which may have keys."""
    roles = ("algorithm=ppo", "roles.critic=separate", "slurm.environment.KEY=secret")
    config = config_of(*CASES["ray_and_engine_nodes"], "run.launcher=slurm", "slurm.cpus_per_task=3", *roles)
    head, *lines = describe_steps(config).splitlines()
    nodes = {"nodes": ("node0", "node1"), "engine_nodes": ("node4", "node5")}
    apart = {"critic": ("node2", "node3")}
    job = Allocation(id="7", restart=0, this_node="node0", folder=Path(), separate=apart, **nodes)
    placed = [make_placement(config, job.nodes), make_placement(config, apart["critic"], "critic")]
    made = [rank_command(config.slurm, each, job, sys.executable) for each in placed]
    assert lines[:2] == [f"  {each.role}: {' '.join(command)}" for each, command in zip(placed, made, strict=True)]
    assert [line.partition(": ")[0] for line in lines[2:]] == [f"  engine {i}" for i in range(4)]
    assert lines[5] == f"  engine 3: {' '.join(job.server_command(['node5'], 12))} ..."
    assert "secret" not in head + "".join(lines)
    here = describe_steps(config_of("rollout=vllm")).splitlines()
    assert here[2:] == ["  engine 0: by the controller"]


def test_a_name_without_an_address_is_asked_for_again_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clouds name a node that they have just made after Slurm has started the job on it."""
    allocation = Allocation(
        id="7", restart=0, this_node="a1", nodes=("a1", "a2"), engine_nodes=("b1",), folder=tmp_path
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
    assert [site.host for (site,) in server_sites(config, allocation)] == ["10.0.0.3"]
    left = 2
    assert allocation.address() == "127.0.0.1"  # by which this machine goes there
    left = 2
    monkeypatch.setattr("launcher.hosts.slurm.allocation._NAME_SECONDS", 0.0)
    said = "node {} of job 7 has no address here after 0 s: Name or service not known.* IPv4.*`getent ahostsv4 {}` find"
    with pytest.raises(EngineError, match=said.format("b1", "b1")):
        server_sites(config, allocation)
    with pytest.raises(ConfigError, match=said.format("a2", "a2")):
        allocation.address()


def test_a_step_with_engine_nodes_beside_it_keeps_to_the_learners(tmp_path: Path) -> None:
    cut = Allocation(id="7", restart=0, this_node="a1", nodes=("a1", "a2"), engine_nodes=("b1", "b2"), folder=tmp_path)
    placement = submit.resolve_job(config_of("slurm.nodes=2")).placement
    slurm = config_of().slurm
    where = cut.learner_options()
    assert step_command(slurm, placement, python="p", where=where)[1] == "--nodelist=a1,a2"
    assert node_command(slurm, placement, tmp_path, python="p", where=where)[1] == "--nodelist=a1,a2"
    server = " ".join(cut.server_command(["b1"], 24))
    assert "srun --overlap --nodes=1 --ntasks=1 --nodelist=b1 --cpus-per-task=24 --mem=0" in server
    assert "--nodelist=a2" in cut.server_command(["a2"], 1)
    ray = " ".join(engine_node_command(cut, 48, python="p"))
    assert "srun --overlap --nodes=2 --ntasks=2 --nodelist=b1,b2 --cpus-per-task=48 --mem=0 " in ray
    assert ray.endswith(f"--output={tmp_path}/ray-engines-%t.txt p -P -m launcher.hosts.ray.node")


# Ports that are held until a server binds them.
HERE = "127.0.0.1"


async def test_a_held_port_goes_to_the_server_alone() -> None:
    with held_ports(HERE) as port:
        for number in (port, port + 1):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((HERE, number))
        for number in (port, port + 1):
            server = await asyncio.start_server(lambda reader, writer: writer.close(), HERE, number)
            async with server:
                with pytest.raises(OSError, match="in use"):
                    await asyncio.start_server(lambda reader, writer: writer.close(), HERE, number)
                reader, writer = await asyncio.open_connection(HERE, number)
                assert await reader.read() == b""
                writer.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was closed a moment ago waits a minute
        other.bind((HERE, port))


def test_no_two_hold_one_port_and_the_system_gives_none_of_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_HIGH", ports._LOW + 8 * ports.BLOCK)
    with contextlib.ExitStack() as stack:
        held = {stack.enter_context(held_ports(HERE)) for _ in range(4)}
        assert len(held) == 4
        assert free_port(HERE) not in held
    with held_ports(HERE) as port:
        monkeypatch.setattr(ports, "_LOW", port)
        monkeypatch.setattr(ports, "_HIGH", port + ports.BLOCK)
        for address in (HERE, ""):
            with pytest.raises(OSError, match="in use"):
                free_port(address)


def test_ports_meet_on_no_node_and_lie_below_the_systems() -> None:
    drawn = [{any_port(number, 300) for _ in range(40)} for number in range(300)]
    assert sum(map(len, drawn)) == len(set().union(*drawn))
    assert all(len(each) > 1 for each in drawn)  # one that is taken there is not drawn for ever
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 <= any_port(number % 7, 7) <= lowest - ports.BLOCK for number in range(1000))
