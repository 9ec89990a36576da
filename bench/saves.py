"""Measure how long training waits for a checkpoint, and a step beside which one is written.

    python -m bench.saves [--gigabytes 1.1] [--tokens 4096] [--steps 4] [--threads 2] [--json FILE]

One rank of a Qwen3-MoE with that much state (weights, their float32 copy and two moments, 16 bytes a parameter on
CPUs), on the disk of ``--folder``. In turns: a step alone; a step while a thread writes the state before it; and the
baseline, a save that training waits for, with a step. *copied*: until the state is copied, of the second save and later
ones, which use the plan of the first; *again*: of one planned again. Their bar is the bytes at half the speed at
which this process copies memory, and 50 ms. The bar of a step with a save is 1.05 of one without, for steps of 5 s and
longer and 1 GB of state and more. Figures are medians, by the clock and in CPU time, which other processes
lengthen less; of a step with a save that is the writing thread's too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.learner import GSPO, make_samples
from bench.results import parse, write
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.shape import ModelShape

STEP_BAR, LATE = 1.05, 0.05  # seconds besides the copy
WIDTH = 512


def shape_of(gigabytes: float) -> ModelShape:
    """A model of layers of 6.8 M parameters, as many as have that much state."""
    layer = 8 * 3 * WIDTH * WIDTH + 2 * WIDTH * 8 * 64 + 2 * WIDTH * 4 * 64
    return ModelShape(
        family="qwen3_moe",
        num_layers=max(1, round(gigabytes * 1e9 / 16 / layer)),
        hidden_size=WIDTH,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        num_experts=8,
        experts_per_token=2,
        expert_width=WIDTH,
        vocab_size=512,
        max_positions=1024,
        rope_theta=1e6,
        norm_eps=1e-6,
        normalize_top_k=True,
        tie_embeddings=False,
    )


Both = tuple[float, float]
"""Seconds by the clock, and of the process's CPU time."""


def now() -> Both:
    """The present times."""
    return time.perf_counter(), time.process_time()


def since(began: Both) -> Both:
    """The times from ``began`` to now."""
    ended = now()
    return ended[0] - began[0], ended[1] - began[1]


def times(function: Callable[[], object]) -> Both:
    """Of one call."""
    began = now()
    function()
    return since(began)


def medians(found: Sequence[Both]) -> Both:
    """Of each kind of time."""
    return statistics.median(clock for clock, _ in found), statistics.median(cpu for _, cpu in found)


def copy_times(num_bytes: int) -> Both:
    """A copy of so many bytes in memory that is there: medians of seven."""
    block = 2**28
    source, target = torch.ones(block, dtype=torch.uint8), torch.zeros(block, dtype=torch.uint8)
    clock, cpu = medians([times(lambda: target.copy_(source)) for _ in range(7)])
    return clock * num_bytes / block, cpu * num_bytes / block


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Medians in seconds, bytes, and their bars."""
    warnings.simplefilter("ignore")  # megatron's imports warn of missing packages
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy

    learner = LearnerSection(threads=args.threads)
    device = world.init_process_groups(learner, rank=0, rendezvous=f"file://{folder}/rendezvous", seed=0)
    torch.set_num_threads(args.threads)
    policy = make_policy(shape_of(args.gigabytes), learner, device, temperature=1.0)
    g = torch.Generator().manual_seed(0)
    for name, tensor in policy.tensors.items():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(0, 0.02, generator=g)
    policy.adopt()
    samples = make_samples(args.tokens, 128, long_tail=False)

    def step() -> None:
        policy.backward([samples], GSPO, num_tokens=args.tokens, num_sequences=args.tokens // 128)
        policy.step(1e-6)

    def fresh() -> Path:
        shutil.rmtree(folder / "save", ignore_errors=True)
        (folder / "save").mkdir()
        return folder / "save"

    step()
    policy.start_save(fresh()).finalize()  # takes the memory that later ones write over
    found: dict[str, list[Both]] = {name: [] for name in ("step", "copied", "with", "waits", "again")}
    written = []
    for _ in range(args.steps):
        found["step"].append(times(step))
        to, began = fresh(), now()
        saving = policy.start_save(to)
        found["copied"].append(since(began))
        step()
        found["with"].append(since(began))
        written.append(saving.finalize().seconds)
        to, began = fresh(), now()
        policy.save(to)
        step()
        found["waits"].append(since(began))
        policy._planned.plan, to, began = None, fresh(), now()
        saving = policy.start_save(to)
        found["again"].append(since(began))
        saving.finalize()
    num_bytes = policy._staged.num_bytes
    world.destroy_process_groups()
    row = {"bytes": float(num_bytes), "written": statistics.median(written)}
    for name, both in {**{name: medians(each) for name, each in found.items()}, "copy": copy_times(num_bytes)}.items():
        row[name], row[f"{name}_cpu"] = both
    return row


def main() -> None:
    """Print the figures beside their bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="a disk to write to; default: the system's for temporary files")
    args = parse(parser)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        row = measure(args, Path(folder))
    print(f"state {row['bytes'] / 1e9:.2f} GB, written in {row['written']:.2f} s")
    small = "" if row["step"] >= 5 and row["bytes"] >= 1e9 else "; this step or state is too small for it"
    for kind, what in (("", "by the clock"), ("_cpu", "of CPU time")):
        row[f"bar{kind}"] = 2 * row[f"copy{kind}"] + LATE
        row[f"ratio{kind}"], row[f"ratio_waits{kind}"] = (row[n + kind] / row[f"step{kind}"] for n in ("with", "waits"))
        print(
            f"{what}: training waits {row[f'copied{kind}']:.3f} s for the copy (bar {row[f'bar{kind}']:.3f}), planned "
            f"again {row[f'again{kind}']:.3f}; a step {row[f'step{kind}']:.2f} s; with a save "
            f"{row[f'ratio{kind}']:.3f} of it (bar {STEP_BAR}{small}), with one that it "
            f"waits for {row[f'ratio_waits{kind}']:.3f}"
        )
    write(args, [{**row, "ratio_bar": STEP_BAR}])


if __name__ == "__main__":
    main()
