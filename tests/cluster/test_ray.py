"""Ranks as Ray actors on a real Slurm: as on one machine, to the bit, beside another such job, and over a requeue.

One comes back after its notice, one because a node of it lost power, without that node.
"""

from __future__ import annotations

from tests.cluster.jobs import Cluster
from tests.exposure import check_secrets, check_sockets

RAY = ("slurm.nodes=2", "run.launcher=ray")


def test_two_jobs_of_ray_share_nodes_and_train_as_one_machine_does(cluster: Cluster) -> None:
    first = cluster.submit("actors", *RAY, "slurm.partition=spare", hold="1 3")
    again = cluster.submit("more-actors", *RAY, "slurm.partition=pair13", "checkpoint.every=0", hold="2")
    again.until_step(2)
    first.until_step(1)  # both are up
    processes = first.processes()
    assert set(check_sockets(processes, loopback=False)) == {"The controller", "A learner rank", "Ray"}
    assert check_secrets(processes, first.run)  # the cluster's
    assert {job.shown()["NodeList"] for job in (first, again)} == {"node[13-14]"}
    first.go_on(1)
    cluster.call("scancel", "--batch", "--signal=USR1", again.id)
    again.until(lambda: "the run saves" in again.log(), "the script's word")
    again.go_on(2)
    assert again.end() == "COMPLETED", again.said()
    assert len(again.attempts()) == 2
    assert "2 ranks on 2 nodes, 1 on each" in (again.run / "log.txt").read_text()
    first.until_step(3)
    cluster.power_off("node14")  # with a rank, but neither the controller nor Ray's head
    first.go_on(3)
    first.until(lambda: first.shown()["Restarts"] == "1" and first.state() == "RUNNING", "the restart without the node")
    assert first.shown()["NodeList"] == "node[13,19]"
    assert first.end() == "COMPLETED", first.said()
    for job in (first, again):
        assert job.record() == cluster.local()
    assert "COMPLETED on node[13-14]" in cluster.program("status", str(again.run))
    for node in (13, 19):
        for job in (first, again):
            assert list(cluster.folder.glob(f"nodes/node{node}/tmp/rlm-{job.id}-*")) == []
