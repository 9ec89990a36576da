"""What a cluster does to a job, on a real Slurm: whatever it is, no step is lost or made twice, to the bit."""

from __future__ import annotations

import time

from tests.cluster.jobs import STEPS, Cluster, Job, Record

TWO = ("slurm.nodes=2",)


def test_two_nodes_train_as_one_machine_does_and_two_jobs_share_them(cluster: Cluster, local: Record) -> None:
    jobs = [cluster.submit(name, *TWO) for name in ("first", "second")]
    for job in jobs:
        job.until(lambda job=job: len(job.ranks()) == 2, "both ranks")  # type: ignore[misc]
    together = {job.shown()["NodeList"] for job in jobs}
    for job in jobs:
        assert job.end() == "COMPLETED", job.said()
        assert job.record() == local
        assert "COMPLETED on node[1-2], restart 0" in cluster.program("status", str(job.run))
    assert together == {"node[1-2]"}
    assert [row["step"] for row in local if row["phase"] == "rl"] == list(range(STEPS + 1))


def test_before_its_time_is_up_a_run_saves_and_goes_on_in_the_next_job(cluster: Cluster, local: Record) -> None:
    job = cluster.submit("usr1", *TWO, "checkpoint.every=0")
    for attempt, step in enumerate((1, 3)):
        job.until_step(step)
        cluster.call("scancel", "--batch", "--signal=USR1", job.id)  # what --signal=B:USR1@ does
        job.until(lambda n=attempt: len(job.log().split("saved; comes back")) == n + 2, "the requeue")  # type: ignore[misc]
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == local
    assert len(job.attempts()) == 3


def test_slurm_tells_of_the_time_limit_early_enough(cluster: Cluster, local: Record) -> None:
    job = cluster.submit(
        "limit", *TWO, "slurm.time=3", "slurm.signal_seconds=90", "reward.function=my_rewards:slow"
    )  # the signal comes 60 to 90 seconds after the start, and the run wants 80 for its rewards alone
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == local
    assert len(job.attempts()) > 1
    assert "the time limit or preemption is near" in job.log()


def test_preempted_it_saves_and_comes_back(cluster: Cluster, local: Record) -> None:
    job = cluster.submit("preempted", *TWO, "checkpoint.every=0")
    job.until_step(2)
    cluster.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.until(lambda: job.shown()["Restarts"] == "1", "preemption")
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == local
    assert "resuming from" in (job.run / "jobs" / f"{job.id}-1" / "controller.txt").read_text()


def test_cancelled_it_stays_so(cluster: Cluster, local: Record) -> None:
    job = cluster.submit("cancelled", *TWO)
    job.until_step(2)
    assert "cancelled" in cluster.program("cancel", str(job.run))
    assert job.end() == "CANCELLED"
    time.sleep(8)  # longer than Slurm holds a requeued job back here
    assert not job.ranks()
    assert job.state() == "CANCELLED"
    assert job.shown()["Restarts"] == "0"
    rows = job.record()
    assert rows == local[: len(rows)]
    sent = cluster.call("sbatch", "--parsable", str(job.run / "job.sbatch"))  # goes on by hand
    assert Job(cluster=cluster, id=sent.strip(), run=job.run).end() == "COMPLETED"
    assert job.record() == local


def test_after_a_crash_it_comes_back_on_another_node(cluster: Cluster, local: Record) -> None:
    job = cluster.submit("crashed", "slurm.nodes=1", "slurm.restarts=1")
    job.until_step(3)
    first = job.shown()["NodeList"]
    job.ranks()[1].kill()
    job.until(lambda: "comes back without" in job.log(), "the requeue")
    job.until(lambda: job.state() == "RUNNING", "the second attempt")
    assert job.shown()["NodeList"] != first
    assert job.shown()["ExcNodeList"] == first
    job.until_step(5)
    job.ranks()[0].kill()  # once too often
    assert job.end() == "FAILED"
    assert "failed with status 1: error: rank 0 (pid" in job.log().splitlines()[-1]
    rows = job.record()
    assert rows == local[: len(rows)]


def test_a_node_that_loses_power_takes_nothing_along(cluster: Cluster, local: Record) -> None:
    job = cluster.submit("power", "slurm.nodes=1")
    job.until_step(3)
    node = job.shown()["NodeList"]
    cluster.power_off(node)  # with the controller, both ranks and the job's script
    job.until(lambda: job.shown()["Restarts"] == "1" and job.state() == "RUNNING", "the restart on the other node")
    assert job.shown()["NodeList"] != node
    assert job.end() == "COMPLETED", job.said()
    cluster.power_on(node)
    assert job.record() == local


def test_a_node_that_loses_its_network_is_waited_for(cluster: Cluster, local: Record) -> None:
    job = cluster.submit("cut", *TWO)
    job.until_step(3)
    cluster.cable("node2", "down")
    try:
        job.until(lambda: job.shown()["Restarts"] == "1", "the requeue")
    finally:
        cluster.cable("node2", "up")
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == local


def test_an_error_of_the_user_ends_it_at_once_with_the_reason(cluster: Cluster) -> None:
    job = cluster.submit("raising", *TWO, "reward.function=my_rewards:raising", "warm_start.steps=0")
    assert job.end() == "FAILED"
    assert job.shown()["Restarts"] == "0"
    assert "failed with status 1: error: reward 'my_rewards:raising' of prompt" in job.log().splitlines()[-1]


def test_what_can_never_run_is_not_sent(cluster: Cluster) -> None:
    text = cluster.program("submit", "tiny_cpu", "slurm.nodes=4", "learner.dp=4", "run.name=never", check=False)
    assert "error: sbatch --test-only" in text, text
    assert not (cluster.work / "runs" / "never").exists()
