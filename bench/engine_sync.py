"""Measure seconds of a weight sync into an engine server on CPUs, and the share of them that its verification takes.

    python -m bench.engine_sync [--engine vllm sglang] [--size tiny large] [--pushes 9] [key=value ...]

Every part is that of a real run: one learner rank of megatron-core, the server as `rollout=vllm` or `sglang` starts it,
the push at the end of a step. *verify* is the time that the push reports for digests and the probe while nothing else
ran; the first two pushes are left out because they touch all memory for the first time. The floor is one copy of the
same bytes in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.results import parse, write
from launcher.hosts.local import LocalLauncher
from launcher.servers.pool import ServerLauncher
from rl_megatron.config.io import load_config
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.layouts.families import read_shape

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2
SHARE_BAR = 0.05
SIZES: Mapping[str, TinySizes] = {
    "tiny": TinySizes(num_heads=2, head_dim=32),
    "large": TinySizes(
        hidden_size=1024, num_layers=5, num_heads=16, num_kv_heads=4, head_dim=64, num_experts=16, expert_width=512
    ),
}


async def measure(engine: str, model: Path, folder: Path, pushes: int, keys: Sequence[str]) -> list[WeightUpdate]:
    """The figures that each push reports."""
    python = ROOT / ".engines" / engine / "bin" / "python"
    given = [f"rollout={engine}", f"rollout.python={python}", "learner.ep=1", "rollout.slots=64", *keys]
    config = load_config("tiny_cpu", given)
    shape = read_shape(model)
    launcher = ServerLauncher(LocalLauncher(model, folder), model, folder, shape)
    async with launcher.start(config) as roles:
        return [await roles.weight_sync.push(version) for version in range(pushes)]


def floor(num_bytes: int) -> float:
    """Seconds of one copy by one thread."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    """Print a row for each engine and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", default=["vllm", "sglang"])
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--pushes", type=int, default=9)
    parser.add_argument("keys", nargs="*", help="more of the run's configuration")
    options = parse(parser)
    rows: list[dict[str, object]] = []
    torch.set_num_threads(1)
    print(f"| model | engine | seconds | GB/s | verify | share | bar | one copy |\n|{' --- |' * 8}")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for size in options.size:
            model = make_tiny_model(SIZES[size], work, seed=1)
            num_bytes = (model / "model.safetensors").stat().st_size
            copy = floor(num_bytes)
            for engine in options.engine:
                folder = work / f"{engine}-{size}"
                folder.mkdir()
                updates = asyncio.run(measure(engine, model, folder, options.pushes, options.keys))[WARM_UP:]
                seconds = statistics.median(u.seconds for u in updates)
                verify = statistics.median(u.verify_seconds for u in updates)
                share = statistics.median(u.verify_seconds / u.seconds for u in updates)
                rate = num_bytes / seconds / 1e9
                row = f"{seconds:.3f} | {rate:.2f} | {verify:.3f} | {share:.1%} | {SHARE_BAR:.0%} | {copy:.3f} |"
                print(f"| {size}, {num_bytes / 1e6:.1f} MB | {engine} | {row}", flush=True)
                rows.append({"size": size, "bytes": num_bytes, "engine": engine, "seconds": seconds, "verify": verify})
                rows[-1] |= {"share": share, "bar": SHARE_BAR, "one copy": copy}
    write(options, rows)


if __name__ == "__main__":
    main()
