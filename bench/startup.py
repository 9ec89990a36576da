"""Time the start of many ranks under Slurm: seconds from srun until all ranks are ready, and the files that they open.

Run from the repository root, as root, with gcc: ``python -m bench.startup [ranks ...] [--each N] [--open-us US ...]
[--json FILE]``. It starts the tests' cluster, and in one job of it, for each number of ranks with
``--each`` on a node, the learner of the tiny model: once as `SlurmLauncher` does, with one task a node that forks, and
once with one task a rank, each with imports of its own. The files come from one server that takes ``--open-us``
microseconds for an open (slow_files.c says what is slowed). A row has both, and beside the share of opens its bar: one
import a node, and a twentieth of one a rank.

All nodes are on this machine and share its cores, so seconds of many ranks are those of the cores; the opens are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from typing_extensions import override

from bench.results import parse, write
from launcher.hosts.slurm.allocation import Allocation, step_command
from launcher.hosts.slurm.launcher import SlurmLauncher
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.placement.ranks import RankPlacement
from tests.cluster.jobs import LIMIT, Cluster

NODES = 22
BAR = 0.05  # opens of a fork, as a share of those of a rank with imports of its own
RANK = """
import os, sys
from launcher.wire import Muster
from launcher.worker.process import serve
serve(Muster.read(sys.stdin.readline()).call, int(os.environ["SLURM_PROCID"]))
"""


class Timed(SlurmLauncher):
    """Starts ranks on some nodes of the allocation, with slowed files, and a task a rank if asked."""

    def __init__(self, model: Path, allocation: Allocation, *, slowed: str, task_a_rank: bool) -> None:
        super().__init__(model, allocation.folder, allocation, lambda _: None)
        self._nodes, self._slowed, self._task_a_rank = allocation.nodes, slowed, task_a_rank

    @override
    def _command(self, config: RunConfig, placement: RankPlacement) -> list[str]:
        where = [f"--export={self._slowed}", f"--nodelist={','.join(self._nodes)}"]
        if not self._task_a_rank:
            return step_command(config.slurm, placement, python=sys.executable, where=where)
        return [
            *("srun", *where, f"--nodes={len(placement.nodes)}", f"--ntasks={placement.dims.world_size}"),
            *(f"--ntasks-per-node={placement.ranks_per_node}", "--distribution=block", "--kill-on-bad-exit=1"),
            *(f"--output={self._allocation.folder}/rank-%t.txt", sys.executable, "-c", RANK),
        ]


async def start(folder: Path, ranks: int, each: int, open_us: int, *, task_a_rank: bool) -> tuple[float, int]:
    """Seconds from srun until all ranks are ready, and how many files were opened meanwhile."""
    keys = [f"learner.dp={ranks}", "learner.ep=1", "learner.threads=1", "run.launcher=slurm"]
    config = load_config("tiny_cpu", [*keys, f"slurm.nodes={ranks // each}", f"slurm.ntasks_per_node={each}"])
    allocation = Allocation.from_environment(folder, config)
    assert allocation is not None
    own = allocation.folder / f"{ranks}-{each}-{open_us}-{task_a_rank}"
    own.mkdir()
    queue = own / "queue"
    queue.write_bytes(bytes(16))
    slowed = f"ALL,LD_PRELOAD={folder}/slow_files.so,SLOW_QUEUE={queue},SLOW_NS={1000 * open_us}"
    some = replace(allocation, nodes=allocation.nodes[: ranks // each], folder=own)
    model = make_tiny_model(TinySizes.of(config.model.tiny), folder / "model", seed=0)
    began = time.monotonic()
    async with Timed(model, some, slowed=slowed, task_a_rank=task_a_rank).start(config):
        seconds = time.monotonic() - began
        opens = int(np.fromfile(queue, np.int64)[1])
    return seconds, opens


def inside(folder: Path) -> None:
    """The job's script: measure what ``asked.json`` asks for, and write the rows."""
    asked, rows = json.loads((folder / "asked.json").read_text()), []
    for ranks in asked["ranks"]:
        for open_us in asked["open_us"]:
            both = [
                asyncio.run(start(folder, ranks, asked["each"], open_us, task_a_rank=task_a_rank))
                for task_a_rank in (False, True)
            ]
            (forked, opens), (tasks, opens_of_tasks) = both
            rows.append(
                {
                    "ranks": ranks,
                    "nodes": ranks // asked["each"],
                    "open_us": open_us,
                    "seconds": forked,
                    "seconds, a task a rank": tasks,
                    "opens": opens,
                    "opens, a task a rank": opens_of_tasks,
                }
            )
            (folder / "rows.json").write_text(json.dumps(rows))


def measure(cluster: Cluster, ranks: Sequence[int], each: int, open_us: Sequence[int]) -> list[dict[str, float]]:
    """Run `inside` as a job. Raises SystemExit with its output if it fails."""
    folder = cluster.work / "start"
    folder.mkdir()
    source = Path(__file__).with_name("slow_files.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", folder / "slow_files.so", source], check=True)
    (folder / "asked.json").write_text(json.dumps({"ranks": ranks, "each": each, "open_us": open_us}))
    program = f"from bench.startup import inside; from pathlib import Path; inside(Path({str(folder)!r}))"
    command = ["sbatch", "--wait", "--partition=urgent", f"--nodes={max(ranks) // each}", f"--ntasks-per-node={each}"]
    command += ["--mem=16000", f"--output={folder}/job.txt", f"--wrap=exec {sys.executable} -c {program!r}"]
    done = subprocess.run(command, cwd=cluster.work, env=cluster.environment(), timeout=LIMIT)
    if done.returncode:
        said = [p.read_text(errors="replace") for p in (folder / "job.txt", *folder.rglob("*-*/*.txt")) if p.exists()]
        sys.exit("\n".join(said))
    rows: list[dict[str, float]] = json.loads((folder / "rows.json").read_text())
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--each", type=int, default=4, help="ranks of a node")
    parser.add_argument("--open-us", type=int, nargs="+", default=[0, 1000], help="microseconds of the server an open")
    args = parse(parser)
    if odd := [n for n in args.ranks if n % args.each or n // args.each > NODES]:
        parser.error(f"{odd[0]} ranks do not fill 1 to {NODES} nodes with {args.each} each")
    with tempfile.TemporaryDirectory(prefix="rl_megatron-") as folder:
        cluster = Cluster(folder=Path(folder) / "slurm", work=Path(folder) / "work")
        try:
            cluster.start(nodes=NODES)
            rows = measure(cluster, args.ranks, args.each, args.open_us)
        finally:
            cluster.stop()
    print("| ranks | nodes | an open | seconds: forked | a task a rank | opens: forked | a task a rank | share (bar) |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        share, bar = row["opens"] / row["opens, a task a rank"], row["nodes"] / row["ranks"] + BAR
        print(
            f"| {row['ranks']} | {row['nodes']} | {row['open_us']} µs | {row['seconds']:.1f} | "
            f"{row['seconds, a task a rank']:.1f} | {row['opens']:,} | {row['opens, a task a rank']:,} | "
            f"{share:.3f} ({bar:.3f}) |"
        )
    write(args, rows)


if __name__ == "__main__":
    main()
