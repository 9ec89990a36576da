"""A job whose server's node loses power goes on without it, and takes another server, on a real Slurm."""

from __future__ import annotations

from tests.cluster.jobs import Cluster, Job

KEYS = (
    *("slurm.nodes=1", "slurm.ntasks_per_node=2", "slurm.partition=elastic", "slurm.engines.nodes=2"),
    "slurm.engines.no_kill=true",
    *("rollout=local", "rollout.server.replicas=2", "train.max_staleness=1", "algorithm.kl.coefficient=0"),
    *("warm_start.steps=0", "train.steps=6", "eval.every=0", "checkpoint.every=0"),
)


def engines(cluster: Cluster, job: Job, *arguments: str) -> list[tuple[str, ...]]:
    """What the command says outside of the job: number, state and node of each server."""
    said = cluster.program("engines", str(job.run), *arguments).splitlines()
    return [tuple(line.split()[:3]) for line in said if line[:1].isdigit()]


def test_a_job_goes_on_without_the_node_of_a_server_and_with_one_that_joins(cluster: Cluster) -> None:
    job = cluster.submit("elastic", *KEYS, hold="2 4")
    job.until_step(2)
    assert engines(cluster, job) == [("0", "healthy", "node27"), ("1", "healthy", "node28")]
    cluster.power_off("node28")
    job.until(lambda: "replica 1 is given up; the run goes on with 0" in (job.run / "log.txt").read_text(), "its end")
    job.go_on(2)
    job.until_step(4)
    assert job.state() == "RUNNING"
    gone, joined = ("1", "gone", "node28"), ("2", "healthy", "node27")
    assert engines(cluster, job, "add") == [("0", "healthy", "node27"), gone, joined]
    assert engines(cluster, job, "drop", "0") == [gone, joined]
    assert "servers of this run can be on node27" in cluster.program(
        *("engines", str(job.run), "add", "--node", "node28"), check=False
    )
    job.go_on(4)
    assert job.end() == "COMPLETED", job.said()
    assert len(job.attempts()) == 1
    rows = [row for row in job.record() if row["phase"] == "rl" and row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [rows[number]["engine/healthy"] for number in (1, 3, 5)] == [2, 1, 1]
    assert rows[-1]["ledger/trained"] == 6 * 4
    assert rows[-1]["ledger/dropped"] == 0
    cluster.power_on("node28")
    a_job_comes_back_from_the_loss_of_its_learners_node(cluster)


def a_job_comes_back_from_the_loss_of_its_learners_node(cluster: Cluster) -> None:
    """On which its script and the controller were; Slurm has nobody end the job then. On the same three nodes."""
    job = cluster.submit("elastic-learner", *KEYS, hold="1")
    job.until_step(1)
    cluster.power_off("node26")
    job.until(lambda: job.state() == "PENDING", "the requeue")
    assert "failed: node node26 was lost, and with it the controller; comes back" in job.log()
    assert job.shown()["Restarts"] == "1"
    cluster.call("scancel", job.id)
    cluster.power_on("node26")
