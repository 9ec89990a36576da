"""A reward server on a node of its own of a real Slurm: started, restarted where it died, and ended with the job."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from tests.cluster.jobs import REPO, Cluster, Job

KEYS = (
    *("slurm.nodes=1", "slurm.ntasks_per_node=2", "slurm.partition=trio", "slurm.services.nodes=1"),
    *("reward.function=service:judge/score", f"services.judge.command={sys.executable} {REPO}/tests/judge.py"),
    *("warm_start.steps=0", "train.steps=30", "eval.every=0", "checkpoint.every=30", "slurm.restarts=0"),
)


def submitted(cluster: Cluster, name: str, *keys: str) -> tuple[Job, Path]:
    mark = cluster.work / f"{name}.starts"
    return cluster.submit(name, *KEYS, f"slurm.environment.JUDGE_STARTS={mark}", *keys), mark


def starts(mark: Path) -> list[list[str]]:
    return [line.split() for line in mark.read_text().splitlines()] if mark.exists() else []


def judge(job: Job) -> psutil.Process:
    """The server, as this machine sees it: a node has process ids of its own. Its guard names the command, too."""
    (found,) = (one for one in job.processes() if one.cmdline()[1:2] == [f"{REPO}/tests/judge.py"])
    return found


def test_it_has_a_node_of_its_own_and_is_restarted_there(cluster: Cluster) -> None:
    job, mark = submitted(cluster, "judged")
    job.until_step(1)
    (first,) = starts(mark)
    judge(job).kill()
    job.until(lambda: len(starts(mark)) == 2, "its restart")
    assert job.end() == "COMPLETED", job.said()
    assert len([row for row in job.record() if row["phase"] == "rl" and row["step"]]) == 30
    node = starts(mark)[1][1]
    assert node == first[1]
    assert (job.run / "placement.txt").read_text().splitlines()[-1] == "service judge: node 1"
    log = (job.run / "log.txt").read_text()
    assert f"service judge, replica 0 ({node}) ended with status" in log
    assert not job.processes()


def test_in_a_heterogeneous_job_it_has_a_component_and_given_up_it_ends_the_run_by_its_name(cluster: Cluster) -> None:
    component = ("slurm.heterogeneous=true", "slurm.services.memory_per_node=2000")
    job, mark = submitted(cluster, "unjudged", *component, "services.judge.restarts=1")
    job.until_step(1)
    (first,) = starts(mark)
    judge(job).kill()
    job.until(lambda: len(starts(mark)) == 2, "its restart")
    assert starts(mark)[1][1] == first[1]
    judge(job).kill()
    assert job.end() == "FAILED", job.said()
    assert "services.judge.restarts=1 are used up" in job.log(), job.log()[-3000:]
    assert (job.run / "placement.txt").read_text().splitlines()[-1] == "service judge: node 1"
    assert not job.processes()
