"""Measure completion tokens per second of the whole loop beside TRL's GRPOTrainer set to GSPO, on two CPU cores.

    python -m bench.end_to_end [--size mid] [--workload equal "long tail"] [--steps 9] [--repeats 1] [--json FILE]

Same random weights, prompts, reward, clip range, float32; one rollout batch a step, trained on in two minibatches with
old log-probs recomputed. *equal*: every completion has the limit's length. *long tail*: lengths are geometric with a
mean of a quarter of the limit, as the policy stays near uniform and that share of the vocabulary ends a sequence; both
sides stop at the first of these tokens and count it. A figure is the median over the steps after
the second; ours is that of the fastest layout. TRL gets its own environment (``--trl-venv``), created if missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.results import parse, write
from bench.trl_gspo import text_hash
from rl_megatron.models.tiny import NUM_BYTES, TinySizes, make_tiny_model
from rl_megatron.observability.files import read_jsonl
from rl_megatron.types import Completion, Prompt

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, PROMPT_TOKENS, GROUP, NEW_TOKENS, MINIBATCHES, CORES = 512, 16, 8, 128, 2, 2
LEARNING_RATE = 1e-7  # the policy stays near uniform
WARM_UP_STEPS = 2
MID = TinySizes(
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    num_experts=16,
    experts_per_token=2,
    expert_width=128,
)
SIZES = {"tiny": (TinySizes(), 32), "mid": (MID, 16)}  # model, prompts of a step
BARS = {("mid", "equal"): 1.5, ("mid", "long tail"): 3.0}
LAYOUTS = {"ep=2": ("learner.ep=2",), "dp=2": ("learner.dp=2",), "threads=2": ("learner.threads=2",)}


async def reward(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
    """``reward.function`` of our run: the same as TRL's."""
    return text_hash(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rollout batch: completion tokens, seconds of the whole, and seconds of each phase."""

    tokens: int
    seconds: float
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The input of both sides."""

    size: str
    workload: str
    model: Path
    prompts: Path
    prompts_per_step: int
    steps: int

    @property
    def equal(self) -> bool:
        """Whether every completion has the limit's length."""
        return self.workload == "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. ``others_cpu``: the share of the machine that other processes took meanwhile."""

    size: str
    workload: str
    side: str
    tokens_per_second: float
    fastest: float
    phases: Mapping[str, float]
    others_cpu: float
    steps: int


def main() -> None:
    """Measure the chosen sizes and workloads, all sides in turns, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["mid"])
    parser.add_argument("--workload", nargs="+", choices=("equal", "long tail"), default=["equal", "long tail"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=9, help=f"of a run; the first {WARM_UP_STEPS} are not counted")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, in turns")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    args = parse(parser)
    trl_python = trl_environment(args.trl_venv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="end_to_end-") as folder:
        for size in args.size:
            for workload in args.workload:
                task = make_task(Path(folder), size, workload, args.steps)
                rows += measure(task, args.layout, args.repeats, trl_python, Path(folder))
    show(rows)
    write(args, [asdict(row) for row in rows])


def trl_environment(folder: Path) -> Path:
    """The Python of TRL's environment, made on first use and when the pins change.

    torch is installed first and separately, as in the Makefile.
    """
    requirements, constraints = ROOT / "bench" / "requirements-trl.txt", ROOT / "constraints.txt"
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    pins = requirements.read_text() + constraints.read_text()
    if not installed.is_file() or installed.read_text() != pins:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(constraints)]
        subprocess.run([*install, "torch"], check=True)
        subprocess.run([*install, "-r", str(requirements)], check=True)
        installed.write_text(pins)
    return python


def make_task(folder: Path, size: str, workload: str, steps: int) -> Task:
    """The model's folder, with the stop tokens of the workload, and the prompts."""
    spec, prompts_per_step = SIZES[size]
    made = make_tiny_model(spec, folder / "models", seed=0, vocab_size=VOCABULARY)
    model = folder / f"{size} {workload}"
    shutil.copytree(made, model)
    if workload == "long tail":
        num_stops = VOCABULARY * 4 // NEW_TOKENS
        path = model / "generation_config.json"
        config = json.loads(path.read_text())
        # TRL always stops at the tokenizer's end token too, so that one is in the list.
        config["eos_token_id"] = [NUM_BYTES, *range(VOCABULARY - num_stops + 1, VOCABULARY)]
        path.write_text(json.dumps(config))
    prompts = folder / "prompts.jsonl"
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT_TOKENS - 1)) + "=" for _ in range(512)]
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": "none"}) + "\n" for text in texts))
    return Task(
        size=size, workload=workload, model=model, prompts=prompts, prompts_per_step=prompts_per_step, steps=steps
    )


def measure(task: Task, layouts: Sequence[str], repeats: int, trl_python: Path, folder: Path) -> list[Row]:
    """One row for TRL and one for each layout of ours."""
    steps: dict[str, list[Step]] = {side: [] for side in ("TRL", *layouts)}
    others: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(repeats):
        for side in steps:
            with tempfile.TemporaryDirectory(dir=folder) as work:
                if side == "TRL":
                    taken, busy = run_trl(task, trl_python, Path(work))
                else:
                    taken, busy = run_ours(task, LAYOUTS[side], Path(work))
            steps[side] += taken[WARM_UP_STEPS:]
            others[side].append(busy)
            seconds = [round(step.seconds, 2) for step in taken]
            print(f"{task.size} {task.workload} {side}: seconds of steps {seconds}", file=sys.stderr, flush=True)
    return [row_of(task, side, steps[side], statistics.median(others[side])) for side in steps]


def row_of(task: Task, side: str, steps: Sequence[Step], others_cpu: float) -> Row:
    """Medians over the steps of all runs."""
    rates = [step.tokens / step.seconds for step in steps]
    return Row(
        size=task.size,
        workload=task.workload,
        side=side,
        tokens_per_second=statistics.median(rates),
        fastest=max(rates),
        phases={name: statistics.median(step.phases[name] for step in steps) for name in steps[0].phases},
        others_cpu=others_cpu,
        steps=len(steps),
    )


def run_trl(task: Task, python: Path, work: Path) -> tuple[list[Step], float]:
    """TRL's steps, and the share of the machine that other processes took."""
    out = work / "steps.json"
    spec = {
        "model": str(task.model),
        "prompts": str(task.prompts),
        "prompts_per_step": task.prompts_per_step,
        "group_size": GROUP,
        "new_tokens": NEW_TOKENS,
        "equal": task.equal,
        "minibatches": MINIBATCHES,
        "learning_rate": LEARNING_RATE,
        "steps": task.steps,
        "threads": CORES,
        "work": str(work),
        "out": str(out),
    }
    (work / "spec.json").write_text(json.dumps(spec))
    busy = run([str(python), str(ROOT / "bench" / "trl_gspo.py"), str(work / "spec.json")])
    rows = json.loads(out.read_text())
    return [Step(tokens=r["tokens"], seconds=r["seconds"], phases={"rollout": r["generate"]}) for r in rows], busy


def run_ours(task: Task, layout: Sequence[str], work: Path) -> tuple[list[Step], float]:
    """Our main job's steps, and the share of the machine that other processes took."""
    config = {
        **our_config(task, work),
        "defaults": [{"algorithm": "gspo"}],
        "reward": {"function": "bench.end_to_end:reward"},
        "train": {"steps": task.steps, "minibatches": MINIBATCHES, "learning_rate": LEARNING_RATE},
    }
    rows, busy = our_rows(config, layout, work)
    names = ("rollout", "logprobs", "train", "weights")
    return [
        Step(
            tokens=row["tokens/rollout"],
            seconds=our_seconds(row),
            phases={name: row[f"seconds/{name}"] for name in names},
        )
        for row in rows
    ], busy


def our_config(task: Task, work: Path) -> dict[str, Any]:
    """What our runs in ``work`` have in common, whatever they optimize."""
    held_out = work / "held_out.jsonl"  # looked at before the first step and after the last, in no step's time
    held_out.write_text(task.prompts.read_text().partition("\n")[0])
    return {
        "run": {"dir": str(work), "name": "run"},
        "model": {"path": str(task.model)},
        "data": {
            "type": "files",
            "train": str(task.prompts),
            "eval": str(held_out),
            "on_leak": "keep",
            "fields": {"prompt": "prompt"},
        },
        "rollout": {
            "prompts_per_step": task.prompts_per_step,
            "group_size": GROUP,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": task.equal,
        },
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
        "log": {"progress": "plain", "sinks": [], "samples_per_step": 0},
    }


def our_rows(config: Mapping[str, Any], layout: Sequence[str], work: Path) -> tuple[list[dict[str, Any]], float]:
    """The metrics of each step of a run in ``work``, and the share of the machine that other processes took."""
    path = work / "run.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    busy = run([sys.executable, "-m", "launcher", "train", "--config", str(path), *layout])
    return [row for row in read_jsonl(work / "run" / "metrics.jsonl") if row["step"]], busy


def our_seconds(row: Mapping[str, Any]) -> float:
    """Seconds of a step without its evaluation."""
    seconds: float = row["seconds/step"] - row.get("seconds/eval", 0.0)
    return seconds


def run(command: Sequence[str]) -> float:
    """Run to the end; return the share of the machine's time that other processes took. Show a failure's output."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(CORES),  # TRL's; our launcher sets its own
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    before, own_before = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    after, own_after = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}\nexit status {done.returncode}")
    own = own_after.ru_utime + own_after.ru_stime - own_before.ru_utime - own_before.ru_stime
    whole = sum(after) - sum(before)
    return max(0.0, (whole - (after.idle - before.idle) - (after.iowait - before.iowait) - own) / whole)


def show(rows: Sequence[Row]) -> None:
    """Print every side, with its ratio to TRL; the bar is for the fastest of ours."""
    print(f"{CORES} cores, {PROMPT_TOKENS} prompt + up to {NEW_TOKENS} new tokens, {GROUP} completions a prompt")
    print("completion tokens/s: median and fastest step; seconds of the phases: medians; CPU that others took")
    print(f"{'size':5} {'workload':10} {'side':10} {'median':>7} {'fastest':>7} {'ratio':>6}  bar  others  phases")
    for row in rows:
        group = [r for r in rows if (r.size, r.workload) == (row.size, row.workload)]
        trl = next(r for r in group if r.side == "TRL")
        best = max((r for r in group if r.side != "TRL"), key=lambda r: r.tokens_per_second)
        bar = BARS.get((row.size, row.workload)) if row is best else None
        phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in row.phases.items())
        print(
            f"{row.size:5} {row.workload:10} {row.side:10} {row.tokens_per_second:7,.0f} {row.fastest:7,.0f} "
            f"{row.tokens_per_second / trl.tokens_per_second:6.2f}  {bar or '':3}  {row.others_cpu:6.0%}  {phases}"
        )


if __name__ == "__main__":
    main()
