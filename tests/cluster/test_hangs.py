"""Ranks that hang on a real Slurm: the job ends with the reason, and all stacks are in the run's folder."""

from __future__ import annotations

import re
import signal

from tests.cluster.jobs import Cluster


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
