"""Roles on nodes of a real Slurm: each on its own, servers that span nodes, and jobs on written text."""

from __future__ import annotations

import contextlib
import sys
from math import prod
from pathlib import Path

import psutil
import pytest

from rl_megatron.weights.routes.mirror import shapes
from tests.cluster.jobs import REPO, Cluster, Job, read_record
from tests.e2e.served_teacher import serving

PYTHON = REPO / ".engines" / "vllm" / "bin" / "python"
SERVED = (
    *("eval.every=0", "rollout=vllm", f"rollout.python={PYTHON}", "rollout.slots=64", "warm_start.steps=0"),
    "train.steps=4",
)
KEYS = (
    *SERVED,
    *("slurm.nodes=1", "slurm.ntasks_per_node=2", "slurm.partition=quad", "slurm.memory_per_node=4000"),
)
ENGINES = {"slurm": ("node17", "node18"), "ray": ("node17",)}
ON = {
    "slurm": (
        *("run.launcher=slurm", "weights.transport=direct", "rollout.server.tp=2", "rollout.server.nodes=2"),
        "slurm.engines.nodes=2",
    ),
    "ray": (
        *("run.launcher=ray", "weights.transport=file", "slurm.engines.nodes=1"),
        "slurm.constraint=rack15|rack16|rack17",
    ),
}
ROUTES = {"slurm": "direct", "ray": "shared_file"}
WHOLE = ("norm.weight", "mlp.gate.weight")  # which both engine ranks hold
REFERENCE = ("roles.reference=separate", "roles.layouts.reference.tp=2")


def programs(job: Job, what: str) -> dict[psutil.Process, str]:
    """Programs of the job whose command line has ``what``, with the node that each runs on."""
    found = {}
    for process in psutil.process_iter():
        try:
            of = process.environ() if any(what in word for word in process.cmdline()[1:4]) else {}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if of.get("RUN_OF_THE_TEST") == job.run.name and "SLURM_PROCID" in of:
            found[process] = of["SLURMD_NODENAME"]
    return found


def nodes_of(job: Job, what: str) -> set[str]:
    """On which nodes such programs run."""
    return set(programs(job, what).values())


with_engine = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"NO TEST OF ROLES: {PYTHON} is not there; make test-engines makes it"
)


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
@with_engine
def test_each_role_of_a_job_is_on_its_nodes(cluster: Cluster, launcher: str) -> None:
    name, engines = f"roles-{launcher}", ENGINES[launcher]
    job = cluster.submit(name, *KEYS, *REFERENCE, *ON[launcher], f"slurm.environment.RUN_OF_THE_TEST={name}")
    job.until(lambda: nodes_of(job, "engine_guard.py") == set(engines), "the server")
    if launcher == "ray":
        (holder,) = [guard.parent() for guard in programs(job, "engine_guard.py")]
        assert holder is not None
        assert "ServerActor" in holder.cmdline()[0]
        assert f"\nengine 0: {engines[0]}\n" in (job.run / "log.txt").read_text()
    job.until_step(1)
    (attempt,) = job.attempts()
    logs = {path.name for path in (job.run / "jobs" / attempt).glob("r[ae][nf]*-?.txt")}
    assert logs == {"rank-0.txt", "rank-1.txt", "reference-0.txt", "reference-1.txt"}
    if launcher == "slurm":
        assert sorted(programs(job, "launcher.worker.node").values()) == 3 * ["node15"] + 3 * ["node16"]
    else:  # a rank from another node than planned would have been refused
        assert nodes_of(job, "launcher.hosts.ray.node") == {"node15", "node16", "node17"}
    if launcher == "ray":
        kill_server(job, engines[-1])
    placed = (job.run / "placement.txt").read_text().splitlines()
    of_reference = {"reference: 2 ranks on 1 nodes, 2 on each", "  node 1: ranks 0-1"}
    assert {"  node 0: ranks 0-1", *of_reference} <= set(placed)
    assert [line for line in placed if line.startswith("engine ")] == [
        f"engine 0: node {2 + i}" for i in range(len(engines))
    ]
    assert f"RUNNING on node[15-{engines[-1].removeprefix('node')}]" in cluster.program("status", str(job.run))
    assert job.end() == "COMPLETED", job.said()
    assert "step 4/4" in (job.run / "jobs" / attempt / "controller.txt").read_text()
    rows = [row for row in job.record() if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["engine/restarts"] for row in (rows[1], rows[-1])] == [0, launcher == "ray"]  # there again, on its node
    assert {row["weights/route"] for row in rows[1:]} == {ROUTES[launcher]}
    assert all(row["kl/reference"] is not None for row in rows[1:])
    assert not nodes_of(job, "engine_guard.py")
    assert not nodes_of(job, "launcher.worker.node")
    assert not weights_left(job.run)
    assert list(cluster.folder.glob(f"nodes/node1[5678]/tmp/rlm-{job.id}-*")) == []


@with_engine
def test_weights_are_handed_on_to_a_server_over_the_learners_nodes(cluster: Cluster) -> None:
    """Each engine rank gets its share from the learner rank on its node, and no byte more; the shared folder none."""
    own = ("slurm.nodes=2", "slurm.ntasks_per_node=1", "slurm.partition=pair17", "weights.transport=direct")
    server = ("rollout.server.tp=2", "rollout.server.nodes=2", "slurm.environment.RUN_OF_THE_TEST=carried")
    keys = ("run.launcher=slurm", "train.steps=2", "checkpoint.every=0", "algorithm.kl.coefficient=0")
    job = cluster.submit("carried", *SERVED, *own, *server, *keys, hold="1")
    job.until_step(1)
    assert nodes_of(job, "engine_guard.py") == nodes_of(job, "launcher.worker.node") == {"node17", "node18"}
    files = [memory_of(cluster, node) for node in ("node17", "node18")]
    assert [weights_in(folder) < 100_000 for folder in files] == [True, True]  # as no reference was written
    kill_server(job, "node18")
    job.until(lambda: all(weights_in(folder) > 600_000 for folder in files), "a file on each node")
    job.go_on(1)
    assert job.end() == "COMPLETED", job.said()
    rows = [row for row in job.record() if row["phase"] == "rl"]
    assert [row["engine/restarts"] for row in (rows[1], rows[-1])] == [0, 1]
    assert {row["weights/route"] for row in rows[1:]} == {"direct"}
    exported = shapes(job.run / "hf_step_000002" / "model.safetensors")
    needed = sum(4 * prod(size) * (2 if name.endswith(WHOLE) else 1) for name, size in exported.items())
    assert [row["weights/bytes"] / needed for row in (rows[1], rows[2])] == [1, 1]
    assert not weights_left(job.run)
    assert [weights_in(folder) for folder in files] == [0, 0]


def memory_of(cluster: Cluster, node: str) -> Path:
    """The node's own /dev/shm, as seen from here."""
    return Path("/proc", (cluster.folder / "run" / f"{node}.pid").read_text().strip(), "root/dev/shm")


def weights_in(memory: Path) -> int:
    """Bytes of weights' files in a node's memory; what was never written takes none."""
    return sum(512 * path.stat().st_blocks for path in memory.glob("rl_megatron-*/model.safetensors"))


def kill_server(job: Job, on: str) -> None:
    """The programs of the server on one node."""
    for server, node in programs(job, "rl_megatron.engines.vllm.server").items():
        if node == on:
            server.kill()


def weights_left(run: Path) -> list[Path]:
    """What was handed to the servers goes with them."""
    return list(run.glob("rl_megatron-*"))


# Servers that span two nodes of a real Slurm: beside the learner's node, with pushes straight into them, or on the
# learner's two nodes, with a file on each. vLLM with tp 2, and its loss of a node, are test_roles.py's.
SPANNING = (
    *("slurm.partition=trio", "rollout.server.nodes=2", "rollout.slots=64", "slurm.memory_per_node=8000"),
    *("warm_start.steps=0", "train.steps=2", "eval.every=0"),
)
NODES = {  # by route
    "direct": ("slurm.nodes=1", "slurm.ntasks_per_node=2", "slurm.engines.nodes=2"),
    "file": ("slurm.nodes=2", "slurm.ntasks_per_node=1"),
}
SERVERS = {
    "vllm": (
        *("rollout.server.dp=2", "rollout.server.ep=2"),
        "rollout.server.options='--worker-extension-cls vllm_ranks.WorkerExtension'",  # stand-ins for CPUs
        f"slurm.environment.PYTHONPATH={REPO}/tests/engines",
    ),
    "sglang": ("rollout.server.tp=2",),
}


@pytest.mark.parametrize(("engine", "route"), [("sglang", "file"), ("sglang", "direct"), ("vllm", "direct")])
def test_a_server_on_two_nodes_samples_what_the_learner_scores(cluster: Cluster, engine: str, route: str) -> None:
    """vLLM in two data-parallel replicas that share the experts, SGLang in two tensor-parallel ranks. 90 seconds."""
    python = REPO / ".engines" / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"NO TEST OF {engine}: {python} is not there; make test-engines makes it")
    keys = (*SPANNING, f"weights.transport={route}", *NODES[route], f"rollout={engine}", f"rollout.python={python}")
    job = cluster.submit(f"two-{engine}-{route}", *keys, *SERVERS[engine])
    assert job.end() == "COMPLETED", job.said()
    rows = [row for row in job.record() if row["phase"] == "rl" and row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert {row["weights/route"] for row in rows} == {route}
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in rows)
    placed = (job.run / "placement.txt").read_text().splitlines()
    first = 1 if route == "direct" else 0
    assert [line for line in placed if line.startswith("engine ")] == [
        f"engine 0: node {first}",
        f"engine 0: node {first + 1}",
    ]
    assert len(list(job.run.glob(f"{engine}_0*.log"))) == 2  # one a node


# Jobs on written text, distillations, and a run that a reward model judges, on two nodes of a real Slurm, with Ray
# and without: as on one machine, to the bit. Two teachers, or one of them, and the reward model are on nodes of their
# own; a server that slurm.setup starts has the other.
STEPS = 6
WRITTEN = (
    *("learner.threads=1", "log.sinks=[]", "data.num_eval=16", f"train.steps={STEPS}"),
    *("checkpoint.every=2", "eval.every=2"),
)
LAST = f"hf_step_{STEPS:06d}"
SAMPLED = ("rollout.prompts_per_step=4", "rollout.group_size=4", "warm_start.steps=0")
TEACHERS = "algorithm.kl.teachers"
TAUGHT = (
    *(*SAMPLED, "algorithm=distill", "algorithm.kl.reference=null", "train.learning_rate=5e-4"),
    *(f"{TEACHERS}.late.path=runs/local-sft/{LAST}", f"{TEACHERS}.late.weight=3"),
    *(f"{TEACHERS}.other.path=runs/local-dpo/{LAST}", "roles.layouts.teacher_other.pp=1"),
)
PORT = 18999  # of the served teacher; each node has a network of its own
OWN = {
    "sft": ("sft.batch_size=16",),
    "dpo": ("dpo.batch_size=16",),
    "reward": ("reward_model.batch_size=16",),
    "teachers": (*TAUGHT, "roles.layouts.teacher_late.tp=1"),
    "served": (
        *(*TAUGHT, f"{TEACHERS}.late.server=http://127.0.0.1:{PORT}"),
        f"{TEACHERS}.late.engine=tests.e2e.served_teacher:Transformers",
    ),
    "judged": (
        *(*SAMPLED, "reward.function=ranks:judge", f"reward_models.judge.path=runs/local-reward/{LAST}"),
        "roles.layouts.reward_judge.tp=1",
    ),
}
CONFIGS = {
    **{recipe: f"{recipe}_tiny" for recipe in OWN},
    **dict.fromkeys(("teachers", "served"), "distill_tiny"),
    "judged": "tiny_cpu",
}
BEFORE = {"teachers": ("sft", "dpo"), "served": ("sft", "dpo"), "judged": ("reward",)}
"""The recipes whose models a recipe needs."""
SERVES = f"{sys.executable} -m tests.e2e.served_teacher runs/local-sft/{LAST} {PORT} >runs/teacher.txt 2>&1 &"
ON_SLURM = {"served": (f"slurm.setup={SERVES}",)}
OTHERS = {
    "teachers": tuple(f"teacher_{name}: 1 ranks on 1 nodes" for name in ("late", "other")),
    "served": ("teacher_other: 1 ranks on 1 nodes",),
    "judged": ("reward_judge: 1 ranks on 1 nodes",),
}
"""What placement.txt says of those beside the learner."""


def local(cluster: Cluster, recipe: str) -> Path:
    """The recipe's run on this machine, without Slurm; made once. What was fine-tuned is the teacher or the judge."""
    for other in BEFORE.get(recipe, ()):
        local(cluster, other)
    with cluster.independent_answers(f"local {recipe}"):
        run = cluster.work / "runs" / f"local-{recipe}"
        if not run.exists():
            teacher = cluster.work / "runs" / "local-sft" / LAST
            with serving(teacher, port=PORT) if recipe == "served" else contextlib.nullcontext():
                cluster.program("train", "--config", CONFIGS[recipe], *WRITTEN, *OWN[recipe], f"run.name={run.name}")
        return run


@pytest.mark.parametrize(
    ("recipe", "launcher"),
    [*((recipe, "slurm") for recipe in OWN), ("sft", "ray"), ("teachers", "ray"), ("judged", "ray")],
)
def test_a_job_on_two_nodes_is_that_of_one_machine(cluster: Cluster, recipe: str, launcher: str) -> None:
    alone = local(cluster, recipe)
    keys = (*WRITTEN, *OWN[recipe], "slurm.nodes=2", f"run.launcher={launcher}", *ON_SLURM.get(recipe, ()))
    job = cluster.submit_config(CONFIGS[recipe], f"{recipe}-{launcher}", *keys)
    assert job.end() == "COMPLETED", job.said()
    assert [row["step"] for row in job.record()] == list(range(STEPS + 1))
    assert job.record() == read_record(alone)
    weights = f"{LAST}/model.safetensors"
    assert (job.run / weights).read_bytes() == (alone / weights).read_bytes()
    assert "2 ranks on 2 nodes" in (job.run / "log.txt").read_text()
    placed = (job.run / "placement.txt").read_text()
    assert all(line in placed for line in OTHERS.get(recipe, ()))
