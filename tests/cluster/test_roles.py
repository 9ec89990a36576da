"""A heterogeneous job: ranks of the learner and of a reference and an engine server, each on the node it asks for.

The server is killed on its node, and comes back there.
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
    "roles.reference=separate",
    "slurm.reference.partition=pair13",
    "slurm.reference.constraint=rack13",
    "slurm.engines.nodes=1",
    "slurm.engines.constraint=rack16",
    "slurm.engines.memory_per_node=4000",
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


@pytest.mark.skipif(not PYTHON.exists(), reason=f"NO TEST OF ROLES: {PYTHON} is not there; make test-engines makes it")
def test_each_role_of_a_heterogeneous_job_is_on_its_nodes(cluster: Cluster) -> None:
    job = cluster.submit("roles", *KEYS, "slurm.environment.RUN_OF_THE_TEST=roles")
    job.until(lambda: nodes_of(job, "launcher.rank") and nodes_of(job, "engine_guard.py"), "both roles")
    assert nodes_of(job, "engine_guard.py") == {"node16"}
    job.until_step(1)
    assert sorted(programs(job, "launcher.rank").values()) == ["node13", "node13", "node15", "node15"]
    (attempt,) = job.attempts()
    logs = {path.name for path in (job.run / "jobs" / attempt).glob("*-?.txt")}
    assert logs == {"rank-0.txt", "rank-1.txt", "reference-0.txt", "reference-1.txt"}
    for server in programs(job, "vllm.entrypoints.openai.api_server"):
        server.kill()
    placed = (job.run / "placement.txt").read_text().splitlines()
    assert {"  node 0: ranks 0-1", "reference: 2 ranks on 1 nodes, 2 on each", "  node 1: ranks 0-1"} <= set(placed)
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
    assert not nodes_of(job, "launcher.rank")
    assert not weights_left(job.run)


def weights_left(run: Path) -> list[Path]:
    """What was handed to the servers goes with them."""
    return list(run.glob("rl_megatron-*"))
