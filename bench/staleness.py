"""Measure what staleness costs: held-out accuracy with train.max_staleness=2 less that without, over paired seeds.

    python -m bench.staleness [--dir DIR] [--json FILE]

Runs docs/studies/staleness.yaml in ``DIR``: five seeds, each with and without staleness, one run at a time. The two
runs of a seed have the same model, warm start, prompts and seeds of samples. What is done is not repeated, and what was
stopped goes on. Prints the mean difference with its 95 % interval (Student's t), which must lie within 0.03 of 0; if it
does not, also the seeds that would settle it if their differences vary as these do.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from bench.results import parse, write
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.intervals import t_quantile

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "docs" / "studies" / "staleness.yaml"
BAR, MOST_SEEDS = 0.03, 10_000
ENOUGH = 2  # seeds for an interval


def seeds_that_settle(value: float, half: float, count: int) -> int | None:
    """The least number of seeds whose interval lies within the bar; None if the mean itself is too far from 0."""
    deviation = half / t_quantile(count - 1) * math.sqrt(count)
    for seeds in range(max(count, ENOUGH), MOST_SEEDS):
        if abs(value) + t_quantile(seeds - 1) * deviation / math.sqrt(seeds) <= BAR:
            return seeds
    return None


def staleness(folder: Path) -> float:
    """Pushes since the oldest token of a completion was sampled, in the mean over a run's completions and steps."""
    found = [float(row.get("staleness/mean") or 0.0) for row in read_jsonl(folder / "metrics.jsonl") if row["step"]]
    return sum(found) / len(found) if found else 0.0


def rows_of(folder: Path) -> list[dict[str, object]]:
    """A row an arm, and one a difference of arms, of the study's results."""
    results = json.loads((folder / "results.json").read_text())
    rows: list[dict[str, object]] = []
    for arm, mean in results["arms"].items():
        cells = [cell for cell in results["cells"] if cell["arm"] == arm and cell["result"] is not None]
        ages = [staleness(folder / cell["run"]) for cell in cells]
        rows.append(
            {
                "what": arm,
                "seeds": mean["count"],
                "accuracy": mean["value"],
                "of_seeds": [cell["result"] for cell in cells],
                "staleness": sum(ages) / len(ages),
            }
        )
    for name, difference in results["differences"].items():
        if difference is None or difference["high"] is None:
            continue
        half = (difference["high"] - difference["low"]) / 2
        value, count = difference["value"], difference["count"]
        met = abs(value) + half <= BAR
        settles = None if met else seeds_that_settle(value, half, count)
        rows.append(
            {
                "what": name,
                "seeds": count,
                "difference": value,
                "low": difference["low"],
                "high": difference["high"],
                "bar": BAR,
                "met": met,
                "seeds_that_settle": settles,
            }
        )
    return rows


def main() -> None:
    """Run what is not done, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=ROOT, help="its runs/staleness/ has the runs")
    args = parse(parser)
    for command in ("run", "report"):
        asked = [sys.executable, "-m", "launcher", "experiment", command, str(STUDY)]
        subprocess.run(asked, cwd=args.dir, check=True)
    rows = rows_of(args.dir / "runs" / "staleness")
    for row in rows:
        print(
            " ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    write(args, rows)


if __name__ == "__main__":
    main()
