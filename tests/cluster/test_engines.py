"""Servers that span two nodes of a real Slurm: beside the learner's node, with pushes straight into them, or on the
learner's two nodes, with a file on each. vLLM with tp 2, and its loss of a node, are test_roles.py's."""

from __future__ import annotations

import pytest

from tests.cluster.jobs import REPO, Cluster

KEYS = (
    *("slurm.partition=trio", "rollout.server.nodes=2", "rollout.slots=64", "slurm.memory_per_node=8000"),
    *("warm_start.steps=0", "train.steps=2", "eval.every=0"),
)
NODES = {  # by route
    "process_group": ("slurm.nodes=1", "slurm.ntasks_per_node=2", "slurm.engines.nodes=2"),
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


@pytest.mark.parametrize(
    ("engine", "route"), [("sglang", "file"), ("sglang", "process_group"), ("vllm", "process_group")]
)
def test_a_server_on_two_nodes_samples_what_the_learner_scores(cluster: Cluster, engine: str, route: str) -> None:
    """vLLM in two data-parallel replicas that share the experts, SGLang in two tensor-parallel ranks. 90 seconds."""
    python = REPO / ".engines" / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"NO TEST OF {engine}: {python} is not there; make test-engines makes it")
    keys = (
        *KEYS,
        f"weights.transport={'file' if route == 'file' else 'direct'}",
        *NODES[route],
        f"rollout={engine}",
        f"rollout.python={python}",
    )
    job = cluster.submit(f"two-{engine}-{route}", *keys, *SERVERS[engine])
    assert job.end() == "COMPLETED", job.said()
    rows = [row for row in job.record() if row["phase"] == "rl" and row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert {row["weights/route"] for row in rows} == {route}
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in rows)
    placed = (job.run / "placement.txt").read_text().splitlines()
    first = 1 if route == "process_group" else 0
    assert placed[-2:] == [f"engine 0: node {first}", f"engine 0: node {first + 1}"]
    assert len(list(job.run.glob(f"{engine}_0*.log"))) == 2  # one a node
