"""``submit --smoke`` on a real Slurm: its kill is of real ranks, and its resume is a real requeue."""

from __future__ import annotations

from tests.cluster.jobs import TINY, Cluster

DUO = ("slurm.nodes=2", "slurm.partition=trio", "slurm.memory_per_node=3000", "slurm.time=30")


def test_two_steps_are_made_killed_and_resumed_on_other_nodes(cluster: Cluster) -> None:
    page = cluster.program("submit", "tiny_cpu", "--smoke", *TINY, *DUO)
    assert page.splitlines()[-1] == "ok: no part failed"
    assert "resumed from the checkpoint of step " in page
    first, second = page.split("kill until the run has named a node: ")
    for part, restart in ((first, 0), (second, 1)):
        assert f", restart {restart}:\n  2 ranks on 2 nodes, 1 on each\n    node" in part
    run = cluster.work / "runs" / "tiny_cpu-smoke"
    (job,) = (line.split()[1].rstrip(":") for line in page.splitlines() if line.startswith("job "))
    assert "\n  step 2: " in first
    assert "resume and a step: " in second
    assert (run / "jobs" / f"{job}-0" / "failed_node").read_text().startswith("node")
    assert "comes back without node" in (run / "jobs" / f"{job}.txt").read_text()
    assert f"job {job}, CANCELLED" in cluster.program("status", str(run))
    assert not (run / "checkpoints").exists()
