"""Measure how long training waits for a checkpoint, and a step beside which one is written.

    python -m bench.saves [--gigabytes 1.1] [--tokens 4096] [--steps 4] [--threads 2] [--json FILE]

One rank of a Qwen3-MoE with that much state (weights, their float32 copy and two moments, 16 bytes a parameter on
CPUs), on the disk of ``--folder``. In turns: a step alone; a step while a thread writes the state before it; and the
baseline, a save that training waits for, with a step. *copied*: until the state is copied, of the second save and later
ones; its bar is the bytes at half the speed at which this process copies memory, and 50 ms. The bar of a step with a
save is 1.05 of one without, for steps of 5 s and longer and 1 GB of state and more. Figures are medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
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


def seconds(function: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def copy_speed(num_bytes: int) -> float:
    """Bytes a second of a copy in memory that is there: the median of seven."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return num_bytes / statistics.median(seconds(lambda: target.copy_(source)) for _ in range(7))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Medians in seconds, bytes, and their bars."""
    warnings.simplefilter("ignore")  # megatron's imports warn of missing packages
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy

    learner = LearnerSection(threads=args.threads)
    device = world.join(learner, rank=0, rendezvous=f"file://{folder}/rendezvous", seed=0)
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
    policy.start_save(fresh()).durable()  # takes the memory that later ones write over
    found: dict[str, list[float]] = {name: [] for name in ("step", "copied", "with", "written", "waits")}
    for _ in range(args.steps):
        found["step"].append(seconds(step))
        began = time.perf_counter()
        saving = policy.start_save(fresh())
        found["copied"].append(time.perf_counter() - began)
        step()
        found["with"].append(time.perf_counter() - began)
        found["written"].append(saving.durable().seconds)
        to = fresh()
        found["waits"].append(seconds(lambda to=to: (policy.save(to), step())))
    medians = {name: statistics.median(values) for name, values in found.items()}
    num_bytes = float(policy._staged.num_bytes)
    world.leave()
    return medians | {"bytes": num_bytes, "bar": 2 * num_bytes / copy_speed(2**28) + LATE}


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
    print(f"training waits {row['copied']:.3f} s for the copy (bar {row['bar']:.3f})")
    ratio, baseline = row["with"] / row["step"], row["waits"] / row["step"]
    small = "" if row["step"] >= 5 and row["bytes"] >= 1e9 else "; this step or state is too small for it"
    print(f"a step {row['step']:.2f} s; with a save {ratio:.3f} of it (bar {STEP_BAR}{small})")
    print(f"with a save that it waits for {baseline:.3f} of it")
    write(args, [{**row, "ratio": ratio, "ratio_waits": baseline, "ratio_bar": STEP_BAR}])


if __name__ == "__main__":
    main()
