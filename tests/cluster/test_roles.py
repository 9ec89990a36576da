"""A heterogeneous job: ranks of the learner and of a reference and an engine server, each on the nodes it asks for.

Once the server has a rank on each of two nodes, srun starts it, and weights come over the network; once an actor of Ray
starts it on one, where it is killed and comes back, and they come in the run's folder. In a last job the server is on
the learner's two nodes: weights are handed on to it there and, when it was killed on one, come from a file on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import psutil
import pytest

from rl_megatron.weights.servers.mirror import shapes
from tests.cluster.jobs import REPO, Cluster, Job

PYTHON = REPO / ".engines" / "vllm" / "bin" / "python"
SERVED = (
    *("eval.every=0", "rollout=vllm", f"rollout.python={PYTHON}", "rollout.slots=64", "warm_start.steps=0"),
    "train.steps=4",
)
KEYS = (
    *SERVED,
    *("slurm.nodes=1", "slurm.ntasks_per_node=2", "slurm.partition=pair15", "slurm.constraint=rack15"),
    *("slurm.heterogeneous=true", "slurm.engines.memory_per_node=4000"),
)
ENGINES = {"slurm": ("node17", "node18"), "ray": ("node16",)}
ON = {
    "slurm": (
        *("run.launcher=slurm", "weights.transport=direct", "rollout.server.tp=2", "rollout.server.nodes=2"),
        *("slurm.engines.nodes=2", "slurm.engines.partition=pair17", "slurm.engines.constraint=rack17|rack18"),
    ),
    "ray": ("run.launcher=ray", "weights.transport=file", "slurm.engines.nodes=1", "slurm.engines.constraint=rack16"),
}
ROUTES = {"slurm": "process_group", "ray": "shared_file"}
WHOLE = ("norm.weight", "mlp.gate.weight")  # which both engine ranks hold
REFERENCE = (
    *("roles.reference=separate", "roles.layouts.reference.tp=2"),
    *("slurm.reference.partition=pair13", "slurm.reference.constraint=rack13"),
)


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
def test_each_role_of_a_heterogeneous_job_is_on_its_nodes(cluster: Cluster, launcher: str) -> None:
    name, engines = f"roles-{launcher}", ENGINES[launcher]
    job = cluster.submit(name, *KEYS, *REFERENCE, *ON[launcher], f"slurm.environment.RUN_OF_THE_TEST={name}")
    job.until(lambda: nodes_of(job, "engine_guard.py") == set(engines), "the server")
    if launcher == "ray":
        (holder,) = [guard.parent() for guard in programs(job, "engine_guard.py")]
        assert holder is not None
        assert "ServerActor" in holder.cmdline()[0]
        assert "\nengine 0: node16\n" in (job.run / "log.txt").read_text()
    job.until_step(1)
    (attempt,) = job.attempts()
    logs = {path.name for path in (job.run / "jobs" / attempt).glob("r[ae][nf]*-?.txt")}
    assert logs == {"rank-0.txt", "rank-1.txt", "reference-0.txt", "reference-1.txt"}
    if launcher == "slurm":
        assert sorted(programs(job, "launcher.worker.node").values()) == 3 * ["node13"] + 3 * ["node15"]
    else:  # a rank from another node than planned would have been refused
        assert nodes_of(job, "launcher.hosts.ray.node") == {"node13", "node15", "node16"}
    if launcher == "ray":
        kill_server(job, engines[-1])
    placed = (job.run / "placement.txt").read_text().splitlines()
    of_reference = {"reference: 2 ranks on 1 nodes, 2 on each", "  node 1: ranks 0-1"}
    assert {"  node 0: ranks 0-1", *of_reference} <= set(placed)
    assert placed[-len(engines) :] == [f"engine 0: node {2 + i}" for i in range(len(engines))]
    assert f"RUNNING on node15 and node13 and {listed(engines)}" in cluster.program("status", str(job.run))
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
    assert list(cluster.folder.glob(f"nodes/node1[35678]/tmp/rlm-{job.id}-*")) == []


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
    assert {row["weights/route"] for row in rows[1:]} == {"carried"}
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
    for server, node in programs(job, "rl_megatron.rollout.servers.vllm.server").items():
        if node == on:
            server.kill()


def listed(nodes: Sequence[str]) -> str:
    """As Slurm writes a list of neighbouring nodes."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0].replace('node', 'node[')}-{nodes[-1].removeprefix('node')}]"


def weights_left(run: Path) -> list[Path]:
    """What was handed to the servers goes with them."""
    return list(run.glob("rl_megatron-*"))
