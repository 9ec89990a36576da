"""Measure trained tokens per second of ``job=sft`` beside TRL's SFTTrainer, on two CPU cores.

    python -m bench.sft [--workload equal "long tail"] [--steps 9] [--repeats 2] [--json FILE]

Same random weights (*mid* of bench.end_to_end), rows and float32; an optimizer step has 32 rows. *equal*: each row has
the limit's length. *long tail*: lengths are geometric with a mean of an eighth of the limit, and at most the limit.
Tokens are those of rows, without padding. A figure is the median over the steps after the second of all repeats, which
take turns; ours is that of the fastest layout, TRL's that of its fastest micro-batch (8 is its default). TRL gets its
own environment (``--trl-venv``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.end_to_end import CORES, LAYOUTS, ROOT, SIZES, VOCABULARY, WARM_UP_STEPS, run, trl_environment
from bench.results import parse, write
from rl_megatron.models.tiny import make_tiny_model

ROWS, MOST, PROMPT = 32, 512, 8  # of a step; tokens of a row and of its prompt, at most and always
MICRO_BATCHES = (1, 4, 8)  # TRL's: rows that it pads together
BARS = {"equal": 1.4, "long tail": 3.0}
LEARNING_RATE = 1e-5


def main() -> None:
    """Measure the chosen workloads, all sides in turns, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--steps", type=int, default=9, help=f"of a run; the first {WARM_UP_STEPS} are not counted")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, in turns")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    args = parse(parser)
    python, rows = trl_environment(args.trl_venv), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="sft-") as folder:
        model = make_tiny_model(SIZES["mid"][0], Path(folder) / "models", seed=0, vocab_size=VOCABULARY)
        for workload in args.workload:
            found = measure(Path(folder), model, workload, args.steps, args.repeats, python)
            rows += found
            show(workload, found)
    write(args, rows)


def lengths_of(workload: str, count: int) -> list[int]:
    """Tokens of each row, its end included."""
    draw = random.Random(0)
    if workload == "equal":
        return [MOST] * count
    return [min(MOST, PROMPT + 2 + int(draw.expovariate(8 / MOST))) for _ in range(count)]


def measure(folder: Path, model: Path, workload: str, steps: int, repeats: int, python: Path) -> list[dict[str, Any]]:
    """Tokens per second of each side's steps."""
    lengths, draw = lengths_of(workload, ROWS * steps), random.Random(1)
    path = folder / f"{workload}.jsonl"
    texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=length)) for length in lengths]
    rows = [
        {"prompt": f"{n:07}=", "completion": text[: length - PROMPT - 1]}
        for n, (length, text) in enumerate(zip(lengths, texts, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for micro_batch in MICRO_BATCHES:
            took = trl_steps(folder, model, path, steps, micro_batch, python)
            tokens = [sum(lengths[i * ROWS : (i + 1) * ROWS]) - ROWS for i in range(steps)]
            found = [count / seconds for count, seconds in zip(tokens, took, strict=True)]
            rates.setdefault(f"TRL, {micro_batch} rows at once", []).extend(found[WARM_UP_STEPS:])
        for layout, keys in LAYOUTS.items():
            rates.setdefault(f"here, {layout}", []).extend(our_rates(folder, model, path, steps, keys)[WARM_UP_STEPS:])
        print(
            f"{workload}: { ({side: round(statistics.median(all_)) for side, all_ in rates.items()}) }", file=sys.stderr
        )
    return [
        {"workload": workload, "side": side, "tokens_per_second": statistics.median(found), "steps": len(found)}
        for side, found in rates.items()
    ]


def trl_steps(folder: Path, model: Path, rows: Path, steps: int, micro_batch: int, python: Path) -> list[float]:
    """Seconds of TRL's steps."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        spec = {
            "model": str(model),
            "rows": str(rows),
            "batch_size": ROWS,
            "micro_batch": micro_batch,
            "steps": steps,
            "max_tokens": MOST,
            "learning_rate": LEARNING_RATE,
            "threads": CORES,
            "work": work,
            "out": f"{work}/steps.json",
        }
        Path(work, "spec.json").write_text(json.dumps(spec))
        run([str(python), str(ROOT / "bench" / "trl_sft.py"), f"{work}/spec.json"])
        took: list[float] = json.loads(Path(work, "steps.json").read_text())
        return took


def our_rates(folder: Path, model: Path, rows: Path, steps: int, layout: Sequence[str]) -> list[float]:
    """Tokens per second of our steps."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        held_out = Path(work, "held_out.jsonl")  # measured before the first step and after the last, in no step's time
        held_out.write_text(rows.read_text().partition("\n")[0])
        config = {
            "job": "sft",
            "run": {"dir": work, "name": "run"},
            "model": {"path": str(model)},
            "data": {
                "type": "files",
                "train": str(rows),
                "eval": str(held_out),
                "on_leak": "keep",
                "prompt_field": "prompt",
                "answer_field": "completion",
            },
            "sft": {"batch_size": ROWS, "max_tokens": MOST},
            "train": {"steps": steps, "learning_rate": LEARNING_RATE},
            "eval": {"every": 0},
            "checkpoint": {"every": 0},
            "log": {"progress": "plain", "tensorboard": False},
        }
        Path(work, "run.yaml").write_text(json.dumps(config))  # JSON is YAML
        run([sys.executable, "-m", "launcher", "train", "--config", f"{work}/run.yaml", *layout])
        found = [json.loads(line) for line in Path(work, "run", "metrics.jsonl").read_text().splitlines()]
        return [
            row["tokens/train"] / (row["seconds/step"] - row.get("seconds/eval", 0.0)) for row in found if row["step"]
        ]


def show(workload: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print every side, with the ratio of the fastest of ours to the fastest of TRL."""
    best = {
        ours: max(
            (row for row in rows if row["side"].startswith("here") is ours),
            key=lambda row: float(row["tokens_per_second"]),
        )
        for ours in (True, False)
    }
    ratio = best[True]["tokens_per_second"] / best[False]["tokens_per_second"]
    print(f"{workload}: tokens/s, medians of {rows[0]['steps']} steps")
    for row in rows:
        print(f"  {row['side']:22} {row['tokens_per_second']:8,.0f}")
    print(f"  {best[True]['side']} over {best[False]['side']}: {ratio:.2f} (bar {BARS[workload]})", flush=True)


if __name__ == "__main__":
    main()
