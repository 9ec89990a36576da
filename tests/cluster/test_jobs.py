"""Jobs on a real Slurm: whatever happens to one, no step is lost or repeated; ``--smoke``, hangs, and Ray's actors."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

from tests.cluster.jobs import STEPS, TINY, Cluster, Job, Record
from tests.exposure import check_secrets, check_sockets

TWO = ("slurm.nodes=2",)
APPTAINER = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/given.txt"
while [ "$1" != /images/rl.sif ]; do shift; done
shift
exec "$@"
"""


def numbers_of(record: Record) -> list[float]:
    return [row[name] for row in record for name in ("warm_start/loss", "loss", "grad_norm") if name in row]


def test_slurm_tells_of_the_time_limit_early_enough(cluster: Cluster) -> None:
    job = cluster.submit("limit", *TWO, "slurm.time=6", "slurm.signal_seconds=240", hold="1")
    job.until(lambda: "the time limit or preemption is near" in job.log(), "the signal, 90 to 120 s after the start")
    job.go_on(1)
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == cluster.local()
    assert len(job.attempts()) > 1


def test_a_node_that_loses_power_takes_nothing_along(cluster: Cluster) -> None:
    job = cluster.submit("power", "slurm.nodes=1", "slurm.partition=pair5", hold="3")
    job.until_step(3)
    node = job.shown()["NodeList"]
    cluster.power_off(node)  # with the controller, both ranks and the job's script
    job.go_on(3)
    job.until(lambda: job.shown()["Restarts"] == "1" and job.state() == "RUNNING", "the restart on the other node")
    assert job.shown()["NodeList"] != node
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == cluster.local()


def test_a_node_that_loses_its_network_is_waited_for(cluster: Cluster) -> None:
    job = cluster.submit("cut", *TWO, "slurm.partition=pair7", hold="3")
    job.until_step(3)
    cluster.cable("node8", "down")
    try:
        job.until(lambda: job.shown()["Restarts"] == "1", "the requeue")
    finally:
        cluster.cable("node8", "up")
    job.go_on(3)
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == cluster.local()


def test_preempted_it_saves_and_comes_back(cluster: Cluster) -> None:
    job = cluster.submit("preempted", *TWO, "slurm.partition=pair9", "checkpoint.every=0", hold="2")
    job.until_step(2)
    urgent = ("--partition=urgent", "--nodelist=node[9-10]", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.call("sbatch", *urgent)
    job.until(lambda: job.shown().get("PreemptTime", "None") != "None", "the notice")
    job.go_on(2)
    job.until(lambda: job.shown()["Restarts"] == "1", "preemption")
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == cluster.local()
    assert "resuming from" in (job.run / "jobs" / f"{job.id}-1" / "controller.txt").read_text()


def test_before_its_time_is_up_a_run_saves_and_goes_on_in_the_next_job(cluster: Cluster) -> None:
    """All of its roles do: a node for the learner, the next for the reference."""
    job = cluster.submit("usr1", "roles.reference=separate", "checkpoint.every=0", hold="1 3")
    for attempt, step in enumerate((1, 3)):
        job.until_step(step)
        cluster.call("scancel", "--batch", "--signal=USR1", job.id)  # what --signal=B:USR1@ does
        job.until(lambda n=attempt: job.log().count("the run saves") == n + 1, "the script's word")  # type: ignore[misc]
        job.go_on(step)
        job.until(lambda n=attempt: job.log().count("saved; comes back") == n + 1, "the requeue")  # type: ignore[misc]
    assert job.end() == "COMPLETED", job.said()
    assert job.record() == cluster.local()
    assert len(job.attempts()) == 3
    placed = re.findall(r"2 ranks on 1 nodes, 2 on each\n  (node\d): ranks 0-1", (job.run / "log.txt").read_text())
    assert len(placed) == 6
    assert all(learner != reference for learner, reference in zip(placed[::2], placed[1::2], strict=True))
    assert job.log().count("saved; comes back\n") == 2


def test_after_a_crash_it_comes_back_on_another_node_than_the_last(cluster: Cluster) -> None:
    """Of two nodes, so the second time on the first again; it fails at the second crash after one checkpoint."""
    keys = ("slurm.nodes=1", "slurm.partition=pair11", "slurm.restarts=1", "checkpoint.every=3")
    job = cluster.submit("crashed", *keys, hold="1 4 5")
    job.until_step(1)
    first = job.shown()["NodeList"]
    job.ranks()[1].kill()
    job.go_on(1)
    job.until(lambda: f"comes back without {first}" in job.log(), "the requeue")
    job.until(lambda: (job.shown()["Restarts"], job.state()) == ("1", "RUNNING"), "the second attempt")
    second = job.shown()["NodeList"]
    assert {first, second} == {"node11", "node12"}
    assert job.shown()["ExcNodeList"] == first
    job.until_step(4)
    job.until((job.run / "checkpoints" / "step_000003").exists, "the checkpoint")
    job.ranks()[1].kill()
    job.go_on(4)
    both = f"; without node11,node12 there are too few nodes; comes back without {second}\n"  # it would wait for ever
    job.until(lambda: both in job.log(), "the second requeue")
    job.until_step(5)
    assert job.shown()["NodeList"] == first
    job.ranks()[0].kill()  # once too often
    job.go_on(5)
    assert job.end() == "FAILED"
    assert "failed with status 1: error: rank 0 (pid" in job.log().splitlines()[-1]
    rows = job.record()
    assert rows == cluster.local()[: len(rows)]


def test_cancelled_it_stays_so(cluster: Cluster) -> None:
    job = cluster.submit("cancelled", *TWO, hold="2")
    job.until_step(2)
    (line,) = (line for line in cluster.program("status", str(job.run)).splitlines() if line.startswith("scancel"))
    cluster.call(*line.split())
    assert job.end() == "CANCELLED"
    job.until(lambda: not job.ranks(), "the end of its ranks")
    job.go_on(2)
    rows = job.record()
    assert rows == cluster.local()[: len(rows)]
    sent = cluster.call("sbatch", "--parsable", str(job.run / "job.sbatch"))  # goes on by hand
    assert Job(cluster=cluster, id=sent.strip(), run=job.run).end() == "COMPLETED"
    assert job.record() == cluster.local()
    assert job.state() == "CANCELLED"  # longer after than Slurm holds a requeued job back
    assert job.shown()["Restarts"] == "0"


def test_two_nodes_train_as_one_machine_does_and_two_jobs_share_them(cluster: Cluster) -> None:
    first = cluster.submit("first", *TWO, "slurm.partition=pair11", hold="0")
    first.until(lambda: len(first.ranks()) == 2, "both ranks")
    second = cluster.plain(*TWO, "slurm.ntasks_per_node=1", partition="pair11")
    second.until(lambda: len(second.ranks()) == 2, "both ranks of the other")
    assert {job.shown()["NodeList"] for job in (first, second)} == {"node[11-12]"}
    first.until_step(0)
    assert set(check_sockets(first.processes(), loopback=False)) == {"A learner rank"}
    check_secrets(first.processes(), first.run)
    first.go_on(0)
    for job in (first, second):
        assert job.end() == "COMPLETED", job.said()
        assert job.record() == cluster.local()
    assert "COMPLETED on node[11-12], restart 0" in cluster.program("status", str(first.run))
    assert [row["step"] for row in first.record() if row["phase"] == "rl"] == list(range(STEPS + 1))


def test_ranks_run_in_a_container_and_another_job_can_wait_for_them(cluster: Cluster) -> None:
    stand_in = cluster.work / "bin" / "apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(APPTAINER)
    stand_in.chmod(0o755)
    inside = cluster.submit(
        *("inside", "train.steps=1", "slurm.container=/images/rl.sif"),
        *("slurm.container_runtime=apptainer", "slurm.container_mounts=/data:/data"),
        *(f"slurm.container_python={sys.executable}", f"slurm.environment.PATH={stand_in.parent}:{os.environ['PATH']}"),
    )
    four = cluster.submit("four", "slurm.nodes=4", "learner.ep=4", f"slurm.options=[--dependency=afterok:{inside.id}]")
    assert four.shown()["Dependency"].startswith("afterok:")
    assert four.end() == "COMPLETED", four.said()
    assert len(numbers_of(inside.record())) == 3  # of the warm start and of the step
    given = (stand_in.parent / "given.txt").read_text().splitlines()
    assert given == [f"exec --bind=/data:/data /images/rl.sif {sys.executable} -P -m launcher.worker.node"]
    whole, parts = cluster.local(), four.record()
    assert [row["step"] for row in parts] == [row["step"] for row in whole]
    assert numbers_of(parts) == pytest.approx(numbers_of(whole), rel=1e-3, abs=1e-5)  # another layout rounds otherwise


def test_an_error_of_the_user_ends_it_at_once_with_the_reason(cluster: Cluster) -> None:
    job = cluster.submit("raising", *TWO, "reward.function=my_rewards:raising", "warm_start.steps=0")
    assert job.end() == "FAILED"
    assert job.shown()["Restarts"] == "0"
    assert "failed with status 1: error: reward 'my_rewards:raising' of prompt" in job.log().splitlines()[-1]


def test_what_can_never_run_is_not_sent(cluster: Cluster) -> None:
    for keys in (
        *(("slurm.nodes=32", "learner.dp=32"), ("slurm.partition=nowhere",), ("slurm.constraint=unheard_of",)),
        *(("slurm.options=[--reservation=nobodys]",), ("slurm.exclude=node[1-4]",)),
    ):
        text = cluster.program("submit", "tiny_cpu", "run.name=never", *keys, check=False)
        assert "error: sbatch --test-only" in text, text
        assert not (cluster.work / "runs" / "never").exists()
    assert "never" not in cluster.call("squeue", "-h", "-o", "%j")


# Ranks that hang on a real Slurm: the job ends with the reason, and all stacks are in the run's folder.
def test_a_stopped_rank_on_another_node_fails_the_job_with_the_reason(cluster: Cluster) -> None:
    limits = ("slurm.restarts=0", "run.watchdog_seconds=20", "checkpoint.every=0")  # disks have a limit of their own
    job = cluster.submit("stopped", "slurm.nodes=2", *limits, hold="2")
    job.until_step(2)
    rank = job.ranks()[1]
    rank.send_signal(signal.SIGSTOP)
    job.go_on(2)
    assert job.end() == "FAILED", job.said()
    said = r"failed with status 1: error: rank 1 \(pid \d+ on (node\d+)\) makes no progress for 20 s"
    found = re.search(said, job.log().splitlines()[-1])
    assert found, job.said()
    assert ", and has sent no heartbeat for " in job.log()
    assert found[1] != job.shown()["BatchHost"]
    written = {path.name: path.read_text() for path in (job.run / "stacks").rglob("*.txt")}
    assert written.keys() == {"rank-0.txt", "rank-1.txt", "controller.txt"}
    assert all("_serve" in written[f"rank-{rank}.txt"] for rank in (0, 1))
    assert not rank.is_running()


# ``submit --smoke`` on a real Slurm: its kill is of real ranks, and its resume is a real requeue.
DUO = ("slurm.nodes=2", "slurm.partition=trio", "slurm.memory_per_node=3000", "slurm.time=30")


def test_two_steps_are_made_killed_and_resumed_on_other_nodes(cluster: Cluster) -> None:
    page = cluster.call(sys.executable, "-m", "launcher", "submit", "tiny_cpu", "--smoke", *TINY, *DUO)
    assert page.splitlines()[-1] == "all parts passed"
    assert "resumed from the checkpoint of step " in page
    first, second = page.split("kill until the run names the failed node: ")
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


# Ranks as Ray actors on a real Slurm: as on one machine, to the bit, beside another such job, and over a requeue. One
# comes back after its notice, one because a node of it lost power, without that node.
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
