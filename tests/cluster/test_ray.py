"""Ranks as Ray actors on a real Slurm: as on one machine, to the bit, beside another such job and over a requeue."""

from __future__ import annotations

from tests.cluster.jobs import Cluster

RAY = ("slurm.nodes=2", "slurm.partition=pair13", "run.launcher=ray", "checkpoint.every=0")


def test_two_jobs_of_ray_share_nodes_and_train_as_one_machine_does(cluster: Cluster) -> None:
    jobs = [cluster.submit("actors", *RAY, hold="1"), cluster.submit("more-actors", *RAY, hold="2")]
    first, again = jobs
    again.until_step(2)
    first.until_step(1)  # both are up
    first.go_on(1)
    cluster.call("scancel", "--batch", "--signal=USR1", again.id)
    again.until(lambda: "the run saves" in again.log(), "the script's word")
    again.go_on(2)
    for job in jobs:
        assert job.end() == "COMPLETED", job.said()
        assert job.record() == cluster.local()
        assert "COMPLETED on node[13-14]" in cluster.program("status", str(job.run))
    assert len(again.attempts()) == 2
    assert "2 ranks on 2 nodes, 1 on each" in (again.run / "log.txt").read_text()
    assert list(cluster.folder.glob("nodes/node1[34]/tmp/rlm-*")) == []
