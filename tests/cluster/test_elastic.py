"""Servers' nodes come and go on a real Slurm: one loses power, one joins the job's Ray cluster; the learner's own node
is lost, with the job's script.
"""

from __future__ import annotations

import subprocess
import sys

from tests.cluster.jobs import Cluster, Job

KEYS = (
    *("slurm.nodes=1", "slurm.ntasks_per_node=2", "slurm.partition=elastic", "slurm.engines.no_kill=true"),
    *("rollout=local", "train.max_staleness=1", "algorithm.kl.coefficient=0"),
    *("warm_start.steps=0", "train.steps=6", "eval.every=0", "checkpoint.every=0"),
)
TWO = ("slurm.engines.nodes=2", "rollout.server.replicas=2")
ON_RAY = ("slurm.engines.nodes=1", "rollout.server.replicas=1", "run.launcher=ray", "rollout.server.restarts=1")


def engines(cluster: Cluster, job: Job, *arguments: str) -> list[tuple[str, ...]]:
    """What the command says outside of the job: number, state and node of each server."""
    said = cluster.program("engines", str(job.run), *arguments).splitlines()
    return [tuple(line.split()[:3]) for line in said if line[:1].isdigit()]


def all_are_trained_on(job: Job, healthy: list[int]) -> None:
    """``healthy``: how many servers there were in the second, fourth and sixth step."""
    assert job.end() == "COMPLETED", job.said()
    assert len(job.attempts()) == 1
    rows = [row for row in job.record() if row["phase"] == "rl" and row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [rows[number]["engine/healthy"] for number in (1, 3, 5)] == healthy
    assert rows[-1]["ledger/trained"] == 6 * 4
    assert rows[-1]["ledger/dropped"] == 0


def test_a_job_goes_on_without_the_node_of_a_server_and_with_one_that_joins(cluster: Cluster) -> None:
    with cluster.alone("elastic"):
        job = cluster.submit("elastic", *KEYS, *TWO, hold="2 4")
        job.until_step(2)
        assert engines(cluster, job) == [("0", "healthy", "node27"), ("1", "healthy", "node28")]
        cluster.power_off("node28")
        given_up = "replica 1 is given up; the run goes on with 0"
        job.until(lambda: given_up in (job.run / "log.txt").read_text(), "its end")
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
        all_are_trained_on(job, [2, 1, 1])
        cluster.power_on("node28")


def test_a_node_joins_a_jobs_ray_and_the_job_comes_back_from_the_loss_of_its_learners(cluster: Cluster) -> None:
    """The node is of another job, by one command in it. On the learner's were script and controller: Slurm has nobody
    end such a job."""
    with cluster.alone("elastic"):
        job = cluster.submit("elastic-ray", *KEYS, *ON_RAY, hold="1 3")
        job.until_step(1)
        there = ("srun", "--partition=elastic", "--nodelist=node28", "--nodes=1", "--mem=3000")
        command = (*there, sys.executable, "-m", "launcher", "engines", str(job.run), "join")
        with subprocess.Popen(
            command, cwd=cluster.work, env=cluster.environment(), stdout=subprocess.PIPE, text=True
        ) as joins:
            assert joins.stdout is not None
            try:
                assert "node28 has joined" in joins.stdout.readline()
                first, joined = ("0", "healthy", "node27"), ("1", "healthy", "node28")
                assert engines(cluster, job, "add", "--node", "node28") == [first, joined]
                assert engines(cluster, job, "drop", "0") == [joined]
                assert engines(cluster, job, "add", "--node", "node27") == [joined, ("2", "healthy", "node27")]
            finally:
                joins.terminate()
        given_up = "replica 1 is given up; the run goes on with 2"
        job.until(lambda: given_up in (job.run / "log.txt").read_text(), "its end")
        job.go_on(1)
        job.until_step(3)
        assert [row["engine/healthy"] for row in job.record() if row["step"] == 3] == [1]
        cluster.power_off("node26")
        job.until(lambda: job.state() == "PENDING", "the requeue")
        assert "failed: node node26 was lost, and with it the controller; comes back" in job.log()
        assert job.shown()["Restarts"] == "1"
        cluster.call("scancel", job.id)
        cluster.power_on("node26")
