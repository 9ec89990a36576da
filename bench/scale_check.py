"""Compare the planner's seconds with those of real runs on this machine: three models in four layouts.

    python -m bench.scale_check [--models narrow wide many] [--layouts one dp2 pp2 ep2] [--steps 8] [--json FILE]

The machine is calibrated first (or --machine FILE.json is taken), by made-up models of other sizes than these. Then
each model is trained as users train it, by GRPO with the embedded engine, one thread a rank, and `--check` compares the
medians of its phases. Bars: a mean error of training of 20 %, and the right order of all pairs of layouts of a model
whose measured seconds lie 15 % apart. Rows also have log-probs, sampling, and all three together.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.results import parse, write
from launcher.calibration.asked import calibrate
from launcher.programs.check import checked_run
from rl_megatron.scaling.machines.calibration import read_calibration, write_calibration
from rl_megatron.scaling.machines.check import CheckedRun

BAR, APART = 0.20, 1.15
_SIZES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts", "expert_width")
MODELS: Mapping[str, Sequence[int]] = {
    "narrow": (128, 4, 4, 2, 32, 8, 128),
    "wide": (384, 2, 6, 2, 64, 4, 384),
    "many": (192, 2, 4, 4, 48, 24, 96),
}
"""Numbers of `_SIZES`; each token chooses two experts."""
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one": ("learner.ep=1",),
    "dp2": ("learner.ep=1", "learner.dp=2"),
    "pp2": ("learner.ep=1", "learner.pp=2"),
    "ep2": ("learner.ep=2",),
}
KEYS = (
    *("run.dir=runs", "learner.threads=1", "learner.max_tokens_per_micro_batch=1024", "train.minibatches=1"),
    *("rollout.prompts_per_step=16", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.temperature=1"),
    *("warm_start.steps=0", "eval.every=0", "checkpoint.every=0", "log.progress=plain", "train.learning_rate=1e-5"),
)
PHASES = ("train", "logprobs", "rollout", "these together")


def compared(folder: Path, machine: Path, model: str, layout: str, steps: int) -> CheckedRun:
    """Train, and compare."""
    sizes = [f"model.tiny.{key}={value}" for key, value in zip(_SIZES, MODELS[model], strict=True)]
    name = f"{model}-{layout}"
    command = [sys.executable, "-m", "launcher", "train", *KEYS, *sizes, *LAYOUTS[layout]]
    done = subprocess.run(
        [*command, f"run.name={name}", f"train.steps={steps}"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return checked_run(folder / "runs" / name, str(machine))


def order(rows: list[dict[str, object]]) -> tuple[int, int]:
    """Pairs of layouts of a model that lie apart, in the right order, and in all."""
    right = total = 0
    for one, other in itertools.combinations(rows, 2):
        a, b = float(str(one["train measured"])), float(str(other["train measured"]))
        if one["model"] == other["model"] and max(a, b) / min(a, b) >= APART:
            total += 1
            right += (float(str(one["train predicted"])) > float(str(other["train predicted"]))) == (a > b)
    return right, total


def main() -> None:
    """Calibrate, train, and print a row a run, then the mean errors and the order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--machine", type=Path, help="a calibration that is there; else this machine is calibrated")
    args = parse(parser)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = args.machine.resolve() if args.machine else folder / "machine.json"
        if args.machine is None:
            ranks = 1 if args.layouts == ["one"] else 2
            say = lambda line: print(f"calibrating, {line}", flush=True)  # noqa: E731
            write_calibration(machine, calibrate(device="cpu", ranks=ranks, threads=1, say=say))
        entry = read_calibration(machine).alone.entry
        print(f"products {entry.flops / 1e9:.0f} GFLOP/s, memory {entry.memory_rate:.1f} GB/s")
        for model, layout in itertools.product(args.models, args.layouts):
            found = compared(folder, machine, model, layout, args.steps)
            row: dict[str, object] = {"model": model, "layout": layout}
            for each in found.phases:
                row |= {f"{each.part} predicted": each.predicted, f"{each.part} measured": each.measured}
                row[f"{each.part} error"] = each.error
            if found.peak is not None:
                row |= {"memory predicted": found.peak.predicted, "memory measured": found.peak.measured}
            rows.append({**row, "terms": dict(found.training)})
            shown = [f"{p.part} {p.predicted:.3f} | {p.measured:.3f} s ({p.error:+.0%})" for p in found.phases]
            if found.peak is not None:
                shown.append(f"memory {found.peak.predicted / 1e9:.2f} | {found.peak.measured / 1e9:.2f} GB")
            print(f"{model:7}{layout:4}", ", ".join(shown), flush=True)
    for phase in PHASES:
        errors = [abs(float(str(row[f"{phase} error"]))) for row in rows if f"{phase} error" in row]
        if errors:
            bar = f" (bar {BAR:.0%})" if phase == "train" else ""
            print(f"mean error of {phase}: {sum(errors) / len(errors):.1%} of {len(errors)} runs{bar}")
    right, total = order(rows)
    print(f"order: {right} of {total} pairs of layouts that lie {APART - 1:.0%} apart are right (bar: all)")
    write(args, [*rows, {"pairs": total, "right": right}])


if __name__ == "__main__":
    main()
