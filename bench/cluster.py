"""Time Slurm: seconds from sbatch to the first step, and from each fault to the job's next step.

Run from the repository root, as root: ``python -m bench.cluster [rounds] [--json FILE]``. It starts the tests' cluster
(each round uses two nodes) and prints a Markdown table of medians and of all rounds. Baseline: the same run on this
machine without Slurm, to its first step. The run writes a checkpoint after each step, so the next step is the one that
the fault interrupted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.results import parse, write
from tests.cluster.jobs import LIMIT, TINY, Cluster, Job, read_record

KEYS = ("train.steps=100000", "checkpoint.every=1", "eval.every=0", "slurm.restarts=100", "slurm.nodes=1")


def last_step(run: Path) -> int:
    """The last recorded step; -1 before the first row."""
    return max((row["step"] for row in read_record(run) if row["phase"] == "rl"), default=-1)


def until(true: Callable[[], object], what: str) -> float:
    """Wait; return the seconds until the condition is true."""
    started = time.monotonic()
    while not true():
        if time.monotonic() - started > LIMIT:
            sys.exit(f"waited {LIMIT:g} s for {what}")
        time.sleep(0.05)
    return time.monotonic() - started


def next_step(job: Job) -> float:
    """Wait; return the seconds until the attempt after this one has made a step."""
    attempts = len(job.attempts())
    waited = until(lambda: len(job.attempts()) > attempts, f"the next attempt of job {job.id}")
    step = last_step(job.run)
    return waited + until(lambda: last_step(job.run) > step, f"the step after {step} of job {job.id}")


def round_of(cluster: Cluster, number: int) -> dict[str, float]:
    """Time one job to its first step and through each fault, and one run on this machine."""
    out, keys = {}, (*KEYS, f"slurm.partition=pair{5 + 2 * number}")
    run = cluster.work / "runs" / f"here-{number}"
    command = [sys.executable, "-m", "launcher", "train", *TINY, *KEYS[:3], f"run.name={run.name}"]
    with subprocess.Popen(command, cwd=cluster.work, env=cluster.environment(), stdout=subprocess.DEVNULL) as here:
        out["to the first step, without Slurm"] = until(lambda: last_step(run) >= 1, "the first step here")
        here.terminate()
    started = time.monotonic()
    job = cluster.submit(f"job-{number}", *keys)
    sent = time.monotonic()
    out["rl-megatron submit"] = sent - started
    out["sbatch to the first step"] = until(lambda: last_step(job.run) >= 1, "the first step")
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    out["the signal before the time limit to the next step"] = next_step(job)
    job.ranks()[1].kill()
    out["a killed rank to the next step, on another node"] = next_step(job)
    cluster.call("scancel", job.id)
    job.end()
    job = cluster.submit(f"power-{number}", *keys)
    until(lambda: last_step(job.run) >= 1, "the first step")
    cluster.power_off(job.shown()["NodeList"])
    out["a node that loses power to the next step, on another node"] = next_step(job)
    cluster.call("scancel", job.id)
    job.end()
    return out


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    args = parse(parser)
    with tempfile.TemporaryDirectory(prefix="rl_megatron-") as folder:
        cluster = Cluster(folder=Path(folder) / "slurm", work=Path(folder) / "work")
        try:
            cluster.start(nodes=4 + 2 * args.rounds)
            measured = [round_of(cluster, number) for number in range(args.rounds)]
        finally:
            cluster.stop()
    print("| from | seconds | all rounds |\n|---|---|---|")
    for what in measured[0]:
        seconds = [each[what] for each in measured]
        print(f"| {what} | {statistics.median(seconds):.1f} | {', '.join(f'{s:.1f}' for s in seconds)} |")
    write(args, [{"from": what, "seconds": [each[what] for each in measured]} for what in measured[0]])


if __name__ == "__main__":
    main()
