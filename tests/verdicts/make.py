"""``python -m tests.verdicts.make FOLDER [KIND ...]``: records runs of each kind, the numbers that the verdicts read.

Each run is ``rl-megatron train`` on one core, with its own seed. Most begin with one of four warm-started models, which
the command trains first. Even seeds have models 0 and 2, odd seeds 1 and 3: thresholds are chosen on even seeds and
tested on odd ones. A run that FOLDER has already is not made again. The records are ``KIND.json.gz`` next to this file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_megatron.observability.files import JsonRow, read_jsonl
from rl_megatron.observability.verdicts import READS

HERE = Path(__file__).parent
COMMON = (
    *("learner.ep=1", "learner.threads=1", "log.progress=plain", "log.sinks=[]", "log.samples_per_step=1"),
    *("rollout.group_size=8", "checkpoint.every=1000", "eval.every=10", "train.steps=100"),
)
WARM = ("train.steps=1", "train.learning_rate=1e-6")  # ends with the exported model of the warm start
MEMORIZE = ("warm_start.steps=300", "warm_start.check_every=300", "warm_start.stop_at_accuracy=1")
RUN = ("warm_start.steps=0", "train.lr_decay=none", "train.lr_warmup_steps=10")
PROMPTS = "rollout.prompts_per_step=32"
ALGORITHMS = ("gspo", "grpo", "dr_grpo", "cispo", "rloo")
KINDS: Mapping[str, Sequence[int]] = {
    "healthy": range(10),
    "collapsed": range(4),
    "stalled": (0, 1, 2, 3, 6, 7),
    "overfitted": range(4),
    "mismatched": range(4),
}
"""The seeds of each kind."""


def keys_of(kind: str, seed: int, folder: Path) -> list[str]:
    """Returns the keys of a run besides `COMMON`; makes the model that it begins with."""
    algorithm = f"algorithm={ALGORITHMS[seed // 2 % len(ALGORITHMS)]}"
    if kind == "stalled" and seed % 4 < 2:  # a random model solves nothing
        return [*RUN, PROMPTS, algorithm]
    if kind == "stalled":  # a model that has learned its twelve problems by heart
        return [algorithm, *few_problems(folder, seed), *MEMORIZE]
    keys = [*RUN, *(() if kind == "overfitted" else (PROMPTS,)), algorithm, f"model.path={base(folder, seed)}"]
    match kind:
        case "healthy":
            keys += ["train.learning_rate=3e-4"]
        case "collapsed":
            keys += [f"train.learning_rate={(0.003, 0.01)[seed // 2]}"]
        case "overfitted":
            keys += few_problems(folder, seed)
        case "mismatched":
            keys += ["train.learning_rate=3e-4", f"rollout.router_noise={(0.5, 2)[seed // 2]}"]
    return keys


def base(folder: Path, seed: int) -> Path:
    """Returns the exported model of a warm start, which ends at a third of the held-out sums."""
    name = f"base-{seed % 4}"
    train(folder, name, [*WARM, f"seed={100 + seed % 4}"])
    return next((folder / "runs" / name).glob("hf_step_*"))


def few_problems(folder: Path, seed: int) -> list[str]:
    """Writes 12 sums to train on and 200 others to hold out. Returns the keys that name them."""
    sums = random.Random(seed).sample([(a, b) for a in range(100) for b in range(100)], 212)
    rows = [{"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"[::-1]} for a, b in sums]
    for name, part in (("train", rows[:12]), ("eval", rows[12:])):
        (folder / f"{name}-{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [
        "data.type=files",
        "rollout.prompts_per_step=12",
        *(f"data.{name}={folder / name}-{seed}.jsonl" for name in ("train", "eval")),
    ]


def train(folder: Path, name: str, keys: Sequence[str]) -> None:
    """Trains the run ``name``, if it is not there."""
    if (folder / "runs" / name / "metrics.jsonl").exists():
        return
    command = [sys.executable, "-m", "launcher", "train", *COMMON, *keys]
    command += [f"run.dir={folder / 'runs'}", f"run.name={name}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"{name}.txt").open("w") as out:
        subprocess.run(command, check=True, stdout=out, stderr=out, env=environment)


def columns(rows: Sequence[JsonRow]) -> dict[str, list[object]]:
    """Returns what the verdicts read, by name, with four digits."""
    found = {name: [row.get(name) for row in rows] for name in READS}
    return {
        name: [float(f"{value:.4g}") if isinstance(value, float) else value for value in values]
        for name, values in found.items()
        if any(value is not None for value in values)
    }


def main() -> None:
    """Makes the runs of each kind, and records them."""
    parser = argparse.ArgumentParser(prog="python -m tests.verdicts.make", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the runs")
    parser.add_argument("kinds", nargs="*", default=[*KINDS], metavar="KIND")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        runs = []
        for seed in KINDS[kind]:
            keys = [*keys_of(kind, seed, folder), f"seed={seed}"]
            train(folder, f"{kind}-{seed}", keys)
            rows = list(read_jsonl(folder / "runs" / f"{kind}-{seed}" / "metrics.jsonl"))
            command = " ".join(["rl-megatron train", *COMMON, *keys]).replace(f"{folder}/", "")
            runs.append({"seed": seed, "command": command, "columns": columns(rows)})
        text = json.dumps({"kind": kind, "runs": runs}, separators=(",", ":"))
        (HERE / f"{kind}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
