"""Train the default task with every algorithm of conf/algorithm/ and compare them on one page.

    python -m bench.algorithms [NAME ...] [--dir runs/algorithms] [--jobs 2] [--set key=value ...]

Each is the default run (``rl-megatron train algorithm=NAME``) in one process with one thread, ``--jobs`` of them at a
time. Algorithms without a ratio take one minibatch per step, VAPO a lambda for short answers, SPO as many prompts as
other rows have completions, GRPO with process rewards a reward of each digit, GDPO a second part for digits alone,
ScaleRL a lower rate. GiGPO is not among them, as a completion of the default task is one turn, and neither are
distillations, which want a teacher. Runs already finished in ``--dir`` are not repeated. Prints a Markdown table and
writes ``report.html`` there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.results import parse, write
from rl_megatron.config.io import load_config
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.report import write_report
from rl_megatron.types import Completion, Prompt

ROOT = Path(__file__).resolve().parent.parent
OF_OTHER_TASKS = {"gigpo", "distill", "gkd"}  # with turns, or a teacher
NAMES = sorted({path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")} - OF_OTHER_TASKS)
PLAIN = ("learner.ep=1", "learner.threads=1", "log.progress=plain", "log.sinks=[]")
ENOUGH = 0.9
STEPS = load_config("tiny_cpu", []).train.steps
LONG_LAMBDA = ("algorithm.lam_length_factor=5",)  # the paper's 0.05 makes lambda 0 below 20 tokens; answers have 4
AS_MANY = ("rollout.prompts_per_step=1024",)  # completions as of groups
SLOWER = ("train.learning_rate=3e-4",)  # samples are eight optimizer steps old
DIGITS = ("reward.function=bench.algorithms:digits",)  # a reward of steps
PARTS = ("reward.parts.exact_match=1", "reward.parts.format=0.5", r"reward.format.pattern=\d+")
SETTINGS = {"gdpo": PARTS, "vapo": LONG_LAMBDA, "spo": AS_MANY, "grpo_process": DIGITS, "scalerl": SLOWER}


def digits(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[object]:
    """A reward: each character of a text is a step, of an equal share of 1 if it is the answer's at its place. The last
    loses a share for each digit that is missing: a wrong step is below the mean, and would be worse than none."""
    return [list(_of_digits(text, prompt.answer)) or -1.0 for text in texts]


def _of_digits(text: str, answer: str) -> Iterator[tuple[int, float]]:
    share = 1 / max(len(text), len(answer))
    for place, one in enumerate(text):
        missing = max(len(answer) - len(text), 0) if place + 1 == len(text) else 0
        yield place + 1, share * ((answer[place : place + 1] == one) - missing)


def train(name: str, folder: Path, settings: list[str]) -> None:
    """Run one algorithm to its end; its output goes to ``<folder>/<name>.log``."""
    metrics = folder / name / "metrics.jsonl"
    if metrics.is_file() and max((r["step"] for r in read_jsonl(metrics)), default=0) >= STEPS:
        return
    command = [sys.executable, "-m", "launcher", "train", f"algorithm={name}", f"run.dir={folder}", f"run.name={name}"]
    if (folder / name / "config.yaml").is_file():
        command.append("--resume")
    with (folder / f"{name}.log").open("a") as log:
        subprocess.run(
            [*command, *PLAIN, *SETTINGS.get(name, ()), *settings],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )


def row(name: str, folder: Path) -> dict[str, object]:
    """Accuracy before, after and at best, the first step with enough of it, and the minutes of its steps."""
    rows = [r for r in read_jsonl(folder / name / "metrics.jsonl") if r["phase"] == "rl"]
    curve = {r["step"]: float(r["eval/accuracy"] or 0) for r in rows if "eval/accuracy" in r}
    first = next((step for step, accuracy in curve.items() if accuracy >= ENOUGH), None)
    minutes = sum(float(r.get("seconds/step") or 0) for r in rows) / 60
    values = list(curve.values())
    out = {"algorithm": name, "before": values[0], "after": values[-1], "best": max(values)}
    return {**out, "first": first, "minutes": minutes, "bar": ENOUGH}


def main() -> None:
    """Run, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--dir", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="settings")
    options = parse(parser)
    folder = options.dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda name: train(name, folder, options.settings), options.names))
    done = [name for name in options.names if (folder / name / "metrics.jsonl").is_file()]
    print(f"| algorithm | accuracy before | after | best | first step at {ENOUGH} | minutes |")
    print("|---|---|---|---|---|---|")
    rows = [row(name, folder) for name in done]
    for r in rows:
        print("| {algorithm} | {before:.3f} | {after:.3f} | {best:.3f} | {first} | {minutes:.1f} |".format(**r))
    print(f"\n{write_report([folder / name for name in done], folder / 'report.html')}")
    print(f"{time.monotonic() - began:.0f} s, {options.jobs} at a time")
    write(options, rows)


if __name__ == "__main__":
    main()
