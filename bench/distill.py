"""Measure sampled tokens per second of on-policy distillation beside TRL's GKDTrainer, on two CPU cores.

    python -m bench.distill [--workload equal "long tail"] [--steps 7] [--repeats 1] [--json FILE]

The task is *mid* of bench.end_to_end, its prompts and lengths: both sides sample 128 completions a step from the
student (TRL with ``lmbda=1``), ask a teacher of the student's size, and make one optimizer step on the generalized
Jensen-Shannon divergence (beta 0.5) over the whole vocabulary. A figure is the median over the steps after the second
of all repeats, which take turns; ours is that of the fastest layout, TRL's that of its fastest micro-batch. TRL gets
its own environment (``--trl-venv``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.end_to_end import (
    CORES,
    GROUP,
    LAYOUTS,
    LEARNING_RATE,
    NEW_TOKENS,
    ROOT,
    SIZES,
    VOCABULARY,
    WARM_UP_STEPS,
    Task,
    make_task,
    our_config,
    our_rows,
    our_seconds,
    run,
    trl_environment,
)
from bench.results import parse, write
from rl_megatron.models.tiny import make_tiny_model

BETA = 0.5
BARS = {"equal": 1.4, "long tail": 3.0}
MICRO_BATCHES = (32, 128)  # TRL's: completions that it samples and trains on together


def main() -> None:
    """Measure the chosen workloads, all sides in turns, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--steps", type=int, default=7, help=f"of a run; the first {WARM_UP_STEPS} are not counted")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, in turns")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    args = parse(parser)
    python, rows = trl_environment(args.trl_venv), list[dict[str, str | float]]()
    with tempfile.TemporaryDirectory(prefix="distill-") as folder:
        teacher = make_tiny_model(SIZES["mid"][0], Path(folder) / "teachers", seed=1, vocab_size=VOCABULARY)
        for workload in args.workload:
            task = make_task(Path(folder), "mid", workload, args.steps)
            found = measure(task, teacher, args.repeats, python, Path(folder))
            rows += found
            show(workload, found)
    write(args, rows)


def measure(task: Task, teacher: Path, repeats: int, python: Path, folder: Path) -> list[dict[str, str | float]]:
    """Sampled tokens per second of each side's steps."""
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for micro_batch in MICRO_BATCHES:
            with tempfile.TemporaryDirectory(dir=folder) as work:
                taken = trl_rates(task, teacher, micro_batch, python, Path(work))
            rates.setdefault(f"TRL, {micro_batch} rows at once", []).extend(taken[WARM_UP_STEPS:])
        for layout, keys in LAYOUTS.items():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                taken = our_rates(task, teacher, keys, Path(work))
            rates.setdefault(f"here, {layout}", []).extend(taken[WARM_UP_STEPS:])
        medians = {side: round(statistics.median(found)) for side, found in rates.items()}
        print(f"{task.workload}: {medians}", file=sys.stderr, flush=True)
    return [
        {"workload": task.workload, "side": side, "tokens_per_second": statistics.median(found), "steps": len(found)}
        for side, found in rates.items()
    ]


def trl_rates(task: Task, teacher: Path, micro_batch: int, python: Path, work: Path) -> list[float]:
    """TRL's sampled tokens per second, step by step."""
    spec = {
        "model": str(task.model),
        "teacher": str(teacher),
        "prompts": str(task.prompts),
        "prompts_per_step": task.prompts_per_step,
        "group_size": GROUP,
        "micro_batch": micro_batch,
        "new_tokens": NEW_TOKENS,
        "equal": task.equal,
        "beta": BETA,
        "learning_rate": LEARNING_RATE,
        "steps": task.steps,
        "threads": CORES,
        "work": str(work),
        "out": str(work / "steps.json"),
    }
    (work / "spec.json").write_text(json.dumps(spec))
    run([str(python), "-m", "bench.trl_gkd", str(work / "spec.json")])
    return [row["tokens"] / row["seconds"] for row in json.loads((work / "steps.json").read_text())]


def our_rates(task: Task, teacher: Path, layout: Sequence[str], work: Path) -> list[float]:
    """Our sampled tokens per second, step by step."""
    config = {
        **our_config(task, work),
        "defaults": [{"algorithm": "gkd"}],
        "algorithm": {
            "kl": {"reference": str(teacher), "beta": BETA, "top_k": VOCABULARY},
            "old_logprobs": "rollout",  # no pass for them: advantages are 0, and the divergence has no ratio
        },
        "reward": {"parts": {"exact_match": 0}},
        "train": {"steps": task.steps, "minibatches": 1, "learning_rate": LEARNING_RATE},
    }
    rows, _ = our_rows(config, layout, work)
    return [row["tokens/rollout"] / our_seconds(row) for row in rows]


def show(workload: str, rows: Sequence[dict[str, str | float]]) -> None:
    """Print every side, and the ratio of the fastest of ours to the fastest of TRL's."""
    rates = {str(row["side"]): float(row["tokens_per_second"]) for row in rows}
    ours, theirs = (
        max((side for side in rates if side.startswith("here") is is_ours), key=rates.__getitem__)
        for is_ours in (True, False)
    )
    print(f"{workload}: tokens/s, medians of {rows[0]['steps']} steps")
    for side, rate in rates.items():
        print(f"  {side:22} {rate:8,.0f}")
    print(f"  {ours} over {theirs}: {rates[ours] / rates[theirs]:.2f} (bar {BARS[workload]})", flush=True)


if __name__ == "__main__":
    main()
