"""Measure trained tokens per second of jobs on written text beside TRL's trainers, on two CPU cores.

    python -m bench.written [--job sft dpo reward_model] [--workload equal "long tail"] [--steps 9] [--repeats 2]

Same random weights (*mid* of bench.end_to_end), rows and float32; an optimizer step has 32 sequences, of jobs on pairs
16 pairs of them. *equal*: each has the limit's length. *long tail*: lengths are geometric with a mean of an eighth of
the limit, and at most the limit. Tokens are those of sequences, without padding. A figure is the median over the steps
after the second of all repeats, which take turns; ours is that of the fastest layout, TRL's that of its fastest
micro-batch (8 rows are its default). TRL gets its own environment (``--trl-venv``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.end_to_end import CORES, LAYOUTS, ROOT, SIZES, VOCABULARY, WARM_UP_STEPS, run, trl_environment
from bench.results import parse, write
from rl_megatron.models.tiny import make_tiny_model

ROWS, MOST, PROMPT = 32, 512, 8  # sequences of a step; tokens of one and of its prompt, at most and always
EACH = {"sft": 1, "dpo": 2, "reward_model": 2}  # sequences of a row, by the job
MICRO_BATCHES = (1, 4, 8)  # TRL's: rows that it pads together
BARS = {"equal": 1.4, "long tail": 3.0}
LEARNING_RATE = 1e-5


def main() -> None:
    """Measure the chosen workloads, all sides in turns, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", nargs="+", choices=EACH, default=list(EACH))
    parser.add_argument("--workload", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--steps", type=int, default=9, help=f"of a run; the first {WARM_UP_STEPS} are not counted")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, in turns")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    args = parse(parser)
    python, rows = trl_environment(args.trl_venv), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="sft-") as folder:
        model = make_tiny_model(SIZES["mid"][0], Path(folder) / "models", seed=0, vocab_size=VOCABULARY)
        for job, workload in product(args.job, args.workload):
            found = measure(Path(folder), model, job, workload, args.steps, args.repeats, python)
            rows += found
            show(f"{job}, {workload}", found, BARS[workload])
    write(args, rows)


def lengths_of(workload: str, count: int) -> list[int]:
    """Tokens of each row, its end included."""
    draw = random.Random(0)
    if workload == "equal":
        return [MOST] * count
    return [min(MOST, PROMPT + 2 + int(draw.expovariate(8 / MOST))) for _ in range(count)]


def written_rows(job: str, lengths: Sequence[int]) -> list[dict[str, str]]:
    """Rows whose sequences have these lengths, their ends included, in the order of ``lengths``."""
    draw, each = random.Random(1), EACH[job]
    names = ("completion",) if each == 1 else ("chosen", "rejected")
    answers = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length - PROMPT - 1)) for length in lengths]
    return [
        {"prompt": f"{n:07}=", **dict(zip(names, answers[each * n : each * (n + 1)], strict=True))}
        for n in range(len(lengths) // each)
    ]


def measure(
    folder: Path, model: Path, job: str, workload: str, steps: int, repeats: int, python: Path
) -> list[dict[str, Any]]:
    """Tokens per second of each side's steps."""
    lengths, path = lengths_of(workload, ROWS * steps), folder / f"{job} {workload}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written_rows(job, lengths)))
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for micro_batch in MICRO_BATCHES:
            took = trl_steps(folder, model, job, path, steps, micro_batch, python)
            tokens = [sum(lengths[i * ROWS : (i + 1) * ROWS]) - ROWS for i in range(steps)]
            found = [count / seconds for count, seconds in zip(tokens, took, strict=True)]
            rates.setdefault(f"TRL, {micro_batch} rows at once", []).extend(found[WARM_UP_STEPS:])
        for layout, keys in LAYOUTS.items():
            rates.setdefault(f"here, {layout}", []).extend(
                our_rates(folder, model, job, path, steps, keys)[WARM_UP_STEPS:]
            )
        print(
            f"{job}, {workload}: { ({side: round(statistics.median(all_)) for side, all_ in rates.items()}) }",
            file=sys.stderr,
        )
    return [
        {
            "job": job,
            "workload": workload,
            "side": side,
            "tokens_per_second": statistics.median(found),
            "steps": len(found),
        }
        for side, found in rates.items()
    ]


def trl_steps(
    folder: Path, model: Path, job: str, rows: Path, steps: int, micro_batch: int, python: Path
) -> list[float]:
    """Seconds of TRL's steps."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        spec = {
            "job": job,
            "model": str(model),
            "rows": str(rows),
            "batch_size": ROWS // EACH[job],
            "micro_batch": min(micro_batch, ROWS // EACH[job]),
            "steps": steps,
            "max_tokens": MOST,
            "learning_rate": LEARNING_RATE,
            "threads": CORES,
            "work": work,
            "out": f"{work}/steps.json",
        }
        Path(work, "spec.json").write_text(json.dumps(spec))
        run([str(python), str(ROOT / "bench" / "trl_written.py"), f"{work}/spec.json"])
        took: list[float] = json.loads(Path(work, "steps.json").read_text())
        return took


def our_rates(folder: Path, model: Path, job: str, rows: Path, steps: int, layout: Sequence[str]) -> list[float]:
    """Tokens per second of our steps."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        held_out = Path(work, "held_out.jsonl")  # measured before the first step and after the last, in no step's time
        held_out.write_text(rows.read_text().partition("\n")[0])
        config = {
            "job": job,
            "run": {"dir": work, "name": "run"},
            "model": {"path": str(model)},
            "data": {
                "type": "files",
                "train": str(rows),
                "eval": str(held_out),
                "on_leak": "keep",
                "fields": {"prompt": "prompt", "answer": "completion"}
                if EACH[job] == 1
                else {"prompt": "prompt", "answer": "chosen", "rejected": "rejected"},
            },
            job: {"batch_size": ROWS // EACH[job], "max_tokens": MOST},
            "train": {"steps": steps, "learning_rate": LEARNING_RATE},
            "eval": {"every": 0},
            "checkpoint": {"every": 0},
            "log": {"progress": "plain", "sinks": []},
        }
        Path(work, "run.yaml").write_text(json.dumps(config))  # JSON is YAML
        run([sys.executable, "-m", "launcher", "train", "--config", f"{work}/run.yaml", *layout])
        found = [json.loads(line) for line in Path(work, "run", "metrics.jsonl").read_text().splitlines()]
        return [
            row["tokens/train"] / (row["seconds/step"] - row.get("seconds/eval", 0.0)) for row in found if row["step"]
        ]


def show(named: str, rows: Sequence[dict[str, Any]], bar: float) -> None:
    """Print every side, with the ratio of the fastest of ours to the fastest of TRL."""
    best = {
        ours: max(
            (row for row in rows if row["side"].startswith("here") is ours),
            key=lambda row: float(row["tokens_per_second"]),
        )
        for ours in (True, False)
    }
    ratio = best[True]["tokens_per_second"] / best[False]["tokens_per_second"]
    print(f"{named}: tokens/s, medians of {rows[0]['steps']} steps")
    for row in rows:
        print(f"  {row['side']:22} {row['tokens_per_second']:8,.0f}")
    print(f"  {best[True]['side']} over {best[False]['side']}: {ratio:.2f} (bar {bar})", flush=True)


if __name__ == "__main__":
    main()
