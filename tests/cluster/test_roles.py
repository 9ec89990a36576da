"""A heterogeneous job: ranks of the learner and of a reference and an engine server, each on the node it asks for.

The server is killed on its node, and comes back there. Once srun starts it and weights come over the network, once an
actor of Ray does and they come in the run's folder.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.cluster.jobs import REPO, Cluster, Job

PYTHON = REPO / ".engines" / "vllm" / "bin" / "python"
KEYS = (
    "eval.every=0",
    "rollout=vllm",
    f"rollout.python={PYTHON}",
    "rollout.slots=64",
    "warm_start.steps=0",
    "train.steps=4",
    "slurm.nodes=1",
    "slurm.ntasks_per_node=2",
    "slurm.partition=pair15",
    "slurm.constraint=rack15",
    "slurm.heterogeneous=true",
    "slurm.engines.nodes=1",
    "slurm.engines.constraint=rack16",
    "slurm.engines.memory_per_node=4000",
)
REFERENCE = ("roles.reference=separate", "slurm.reference.partition=pair13", "slurm.reference.constraint=rack13")


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


@pytest.mark.parametrize(("launcher", "transport"), [("slurm", "process_group"), ("ray", "file")])
@pytest.mark.skipif(not PYTHON.exists(), reason=f"NO TEST OF ROLES: {PYTHON} is not there; make test-engines makes it")
def test_each_role_of_a_heterogeneous_job_is_on_its_nodes(cluster: Cluster, launcher: str, transport: str) -> None:
    name = f"roles-{launcher}"
    more = (f"run.launcher={launcher}", f"weights.transport={transport}")
    job = cluster.submit(name, *KEYS, *REFERENCE, *more, f"slurm.environment.RUN_OF_THE_TEST={name}")
    job.until(lambda: nodes_of(job, "engine_guard.py"), "the server")
    assert nodes_of(job, "engine_guard.py") == {"node16"}
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
        assert sorted(programs(job, "launcher.worker.remote").values()) == ["node13", "node13", "node15", "node15"]
    else:  # a rank from another node than planned would have been refused
        assert nodes_of(job, "launcher.hosts.ray.node") == {"node13", "node15", "node16"}
    for server in programs(job, "vllm.entrypoints.openai.api_server"):
        server.kill()
    placed = (job.run / "placement.txt").read_text().splitlines()
    of_reference = {"reference: 2 ranks on 1 nodes, 2 on each", "  node 1: ranks 0-1"}
    assert {"  node 0: ranks 0-1", *of_reference} <= set(placed)
    assert placed[-1] == "engine 0: node 2"
    followed = cluster.program("attach", str(job.run))  # to its end
    assert "RUNNING on node15 and node13 and node16" in followed
    assert "step 4/4" in followed
    assert job.end() == "COMPLETED", job.said()
    rows = [row for row in job.record() if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["engine/restarts"] for row in (rows[1], rows[-1])] == [0, 1]  # there again, on its node
    assert all(row["kl/reference"] is not None for row in rows[1:])
    assert not nodes_of(job, "engine_guard.py")
    assert not nodes_of(job, "launcher.worker.remote")
    assert not weights_left(job.run)
    assert list(cluster.folder.glob(f"nodes/node1[356]/tmp/rlm-{job.id}-*")) == []


def weights_left(run: Path) -> list[Path]:
    """What was handed to the servers goes with them."""
    return list(run.glob("rl_megatron-*"))
