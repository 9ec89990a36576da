"""Measure the memory of a run's processes over its steps: controller and ranks, each ``--every`` steps.

    python -m bench.memory [--steps 1500] [--every 100] [--json FILE]

A run of the tiny model as users start it (two ranks, embedded engine, a push a step), in batches of 16 completions of
unlike lengths, so that nearly every micro-batch has its own shape. Resident memory is the least within ``--every``
steps, because ranks return freed memory at every 25th. The bar limits the growth from step 300 to the last: 2 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.results import parse, write

WARM, BAR = 300, 0.02
REWARD = "def even(prompt, completions, texts):\n    return [float(sum(c.token_ids) % 2 == 0) for c in completions]\n"
KEYS = (
    *("run.name=memory", "run.dir=runs", "reward.function=my_rewards:even", "log.progress=plain"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=16"),
    *("warm_start.steps=2", "eval.every=0", "checkpoint.every=0", "learner.threads=1", "train.learning_rate=1e-4"),
)


def processes(run: psutil.Process) -> dict[str, psutil.Process]:
    """The controller and its ranks by name, without the process from which ranks are forked."""
    below = [p for p in run.children(recursive=True) if p.ppid() != run.pid]
    return {"controller": run, **{f"rank {i}": p for i, p in enumerate(sorted(below, key=lambda p: p.pid))}}


def measure(steps: int, every: int) -> dict[str, dict[int, float]]:
    """MB of each process, the least of the ``every`` steps up to each step."""
    held: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_rewards.py").write_text(REWARD)
        rows = Path(folder, "runs", "memory", "metrics.jsonl")
        with Path(folder, "out.txt").open("wb") as out:
            command = [sys.executable, "-m", "launcher", "train", *KEYS, f"train.steps={steps}"]
            path = os.pathsep.join((folder, str(Path(__file__).resolve().parents[1])))
            run = psutil.Popen(
                command,
                cwd=folder,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            while run.poll() is None:
                time.sleep(0.1)
                made = rows.read_bytes().count(b'"phase": "rl"') if rows.exists() else 0
                if not 0 < made <= steps:
                    continue
                last = -(-made // every) * every
                for name, process in processes(run).items():
                    try:
                        now = process.memory_info().rss / 1e6
                    except psutil.NoSuchProcess:
                        continue
                    if now:
                        so_far = held.setdefault(name, {})
                        so_far[last] = min(now, so_far.get(last, now))
        if run.returncode:
            sys.exit(Path(folder, "out.txt").read_text())
    return held


def main() -> None:
    """Print a line a process, and what its memory grew by beside the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=100)
    args = parse(parser)
    if args.steps < WARM or args.every < 1 or args.steps % args.every or WARM % args.every:
        parser.error(
            f"--steps {args.steps} --every {args.every}: growth is from step {WARM} to the last; "
            f"give at least {WARM} steps, and an --every that divides them and {WARM}"
        )
    rows = []
    for name, held in measure(args.steps, args.every).items():
        growth = held[args.steps] / held[WARM] - 1
        rows.append({"process": name, "mb": held, "growth": growth, "bar": BAR})
        shown = " ".join(f"{step}:{mb:.0f}" for step, mb in held.items())
        print(f"{name:10} MB at step {shown}; {growth:+.1%} from step {WARM} (bar {BAR:.0%})", flush=True)
    write(args, rows)


if __name__ == "__main__":
    main()
