"""Ranks as Ray actors on a real Slurm: as on one machine, to the bit, beside another such job and over a requeue."""

from __future__ import annotations

from tests.cluster.jobs import Cluster, Record

RAY = ("slurm.nodes=2", "run.launcher=ray")


def test_two_jobs_of_ray_share_nodes_and_train_as_one_machine_does(cluster: Cluster, local: Record) -> None:
    jobs = [cluster.submit(name, *RAY, "checkpoint.every=0") for name in ("actors", "more-actors")]
    again = jobs[1]
    again.until_step(2)
    cluster.call("scancel", "--batch", "--signal=USR1", again.id)
    again.until(lambda: "saved; comes back" in again.log(), "the requeue")
    for job in jobs:
        assert job.end() == "COMPLETED", job.said()
        assert job.record() == local
        assert "COMPLETED on node[1-2]" in cluster.program("status", str(job.run))
    assert len(again.attempts()) == 2
    assert "Ray 2.60.0: 2 ranks on 2 nodes, 1 on each" in (again.run / "log.txt").read_text()
    left = [node for node in ("node1", "node2") if list(cluster.folder.glob(f"nodes/{node}/tmp/rlm-*"))]
    assert left == []
