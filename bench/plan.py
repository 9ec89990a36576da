"""Measure seconds and memory to plan a move of weights at cluster scale; `bench.transport` times moves.

Run from the repository root: ``python -m bench.plan [--json FILE]``. Prints Markdown tables. Each plan has its own
process and core. ``seconds`` is the plan; ``a process's part`` counts the transfers of one rank, then the seconds
to write them out (the larger of one learner rank's and one engine rank's).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from bench.results import parse, write
from rl_megatron.config.sections.learner import layer_counts
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables import deepseek_v3, grouped_query
from rl_megatron.weights.plans.plan import plan

QWEN3 = (grouped_query.HF_QWEN3_MOE, grouped_query.MEGATRON_QWEN3_MOE, grouped_query.ENGINE_QWEN3_MOE)
DEEPSEEK = (deepseek_v3.HF_DEEPSEEK_V3, deepseek_v3.MEGATRON_DEEPSEEK_V3, deepseek_v3.ENGINE_DEEPSEEK_V3)
Numbers = Mapping[str, Any]

SECONDS_BAR, PEAK_BAR = 5.0, 2048
FULL, TP8, EP64 = {"dp": 256}, {"tp": 8, "etp": 8, "dp": 32}, {"dp": 256, "ep": 64}
LEARNERS: Mapping[str, Numbers] = {  # 512 ranks each
    "qwen3-235b-a22b": {"tp": 4, "pp": 8, "ep": 16, "dp": 16, "stages": "11+12*6+11"},
    "deepseek-v3": {"tp": 4, "pp": 8, "ep": 32, "dp": 16, "stages": "7+8*6+6"},
    "kimi-k2": {"tp": 2, "pp": 16, "ep": 16, "dp": 16, "stages": "3+4*14+2"},
}
RANKS: tuple[Numbers, ...] = (
    {"tp": 2, "dp": 8, "ep": 16},
    {"tp": 2, "dp": 64, "ep": 128},
    {"tp": 2, "pp": 4, "dp": 128, "ep": 128, "stages": "16+15*3"},
    {"tp": 2, "pp": 16, "dp": 256, "ep": 128, "stages": "3+4*14+2"},
    {"tp": 2, "pp": 16, "dp": 512, "ep": 128, "stages": "3+4*14+2"},
)
SIZES: tuple[Numbers, ...] = (
    {"num_layers": 8, "num_experts": 16, "hidden_size": 1024},
    {"num_layers": 16, "num_experts": 64, "hidden_size": 2048},
    {"num_layers": 32, "num_experts": 128, "hidden_size": 4096},
    {"num_layers": 61, "num_experts": 384, "hidden_size": 7168},
)


def shape(layers: int, hidden: int, heads: tuple[int, int, int], experts: tuple[int, int], vocab: int) -> ModelShape:
    """``heads`` are (query, key-value, size), ``experts`` (number, width)."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        num_experts=experts[0],
        experts_per_token=2,
        expert_width=experts[1],
        vocab_size=vocab,
        rope_theta=1e6,
        norm_eps=1e-6,
        normalize_top_k=True,
        tie_embeddings=False,
        max_positions=4096,
    )


MID = shape(4, 256, (8, 4, 32), (16, 128), 512)
LARGE = shape(8, 1024, (16, 4, 64), (32, 512), 32000)


def layout(table: int, model: ModelShape, numbers: Numbers) -> Layout:
    """``numbers`` are degrees, and the layers of each stage."""
    dims = ParallelDims(**{key: value for key, value in numbers.items() if key != "stages"})
    stages = layer_counts(numbers["stages"]) if "stages" in numbers else None
    return Layout(table=(DEEPSEEK if model.latent else QWEN3)[table], shape=model, dims=dims, stages=stages)


def measure(name: str, sizes: Numbers, learner: Numbers, engine: Numbers) -> None:
    """Plan once, in this process, and print what it took as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    model = replace(NAMED[name], **sizes)
    src, dst = layout(1, model, learner), layout(0 if engine.keys() == {"dp"} else 2, model, engine)
    ranks, engines = src.dims.world_size, dst.dims.world_size
    started = time.perf_counter()
    moves = plan(src, dst, placement={rank: ranks + rank for rank in range(engines)})
    planned = time.perf_counter()
    sends = len(list(moves.sends(0)))
    sent = time.perf_counter()
    receives = len(list(moves.receives(ranks)))
    parts = max(sent - planned, time.perf_counter() - sent)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    elements = sum(prod(size) for size in layout(0, model, {}).local_shapes(0).values())
    result = {
        "elements": elements,
        "ranks": ranks,
        "engines": engines,
        "transfers": moves.num_transfers(),
        "stretches": len(moves.stretches),
        "mine": max(sends, receives),
        "seconds": planned - started,
        "parts": parts,
        "peak": peak,
    }
    if ranks <= 512:  # the most that a rank sends, over the mean of its stage
        load = [0] * ranks
        for (sender, _), count in moves.traffic().items():
            load[sender] += count
        size = ranks // src.dims.pp
        stages = [load[start : start + size] for start in range(0, ranks, size)]
        result["uneven"] = max(max(stage) * len(stage) / sum(stage) for stage in stages)
    print(json.dumps(result))


def apart(name: str, sizes: Numbers, learner: Numbers, engine: Numbers) -> tuple[dict[str, object], str]:
    """A row, measured in its own process, and its cells."""
    point = json.dumps([name, sizes, learner, engine])
    done = subprocess.run([sys.executable, "-m", "bench.plan", point], capture_output=True, text=True, check=True)
    r = json.loads(done.stdout)
    uneven = f"{r['uneven']:.3f}" if "uneven" in r else ""
    cells = (
        f"{r['elements'] / 1e9:,.1f} B | {r['ranks']:,} to {r['engines']:,} | {r['transfers']:,} | "
        f"{r['stretches']:,} | {r['seconds']:.2f} | {r['mine']:,} | {r['parts']:.2f} | {r['peak']:.0f} MiB | {uneven} |"
    )
    return {"model": name, "sizes": sizes, "learner": learner, "engine": engine, **r}, cells


def planning() -> list[dict[str, object]]:
    """Named models at 512 to 256 ranks, then growth over three decades of ranks and of parameters."""
    rows: list[dict[str, object]] = []

    def show(label: str, *point: Any) -> None:
        row, cells = apart(*point)
        rows.append(row)
        print(f"| {label} | {cells}", flush=True)

    print(f"bar at 512 ranks into 256: {SECONDS_BAR} s, {PEAK_BAR} MiB")
    columns = (
        "parameters | ranks | transfers | stretches | seconds | a process's part | seconds | peak memory | max/mean |"
    )
    print(f"| model | engines | {columns}\n|{' --- |' * 11}")
    for name, learner in LEARNERS.items():
        for kind, engine in (("full copies", FULL), ("tp8", TP8), ("dp attention, ep64", EP64)):
            show(f"{name} | {kind}", name, {}, learner, engine)
    print(f"\n| kimi-k2 into engines of tp8 | {columns}\n|{' --- |' * 10}")
    for learner in RANKS:
        ranks = prod(learner[key] for key in ("tp", "pp", "dp") if key in learner)
        show(numbers(learner), "kimi-k2", {}, learner, {"tp": 8, "etp": 8, "dp": ranks // 16})
    print(f"\n| kimi-k2's shape, smaller; 512 ranks into engines of tp8 | {columns}\n|{' --- |' * 10}")
    for sizes in SIZES:
        learner = {"tp": 2, "pp": 4, "ep": 16, "dp": 64} | ({"stages": "16+15*3"} if sizes["num_layers"] == 61 else {})
        show(numbers(sizes), "kimi-k2", sizes, learner, TP8)
    return rows


def numbers(given: Numbers) -> str:
    """Format as a table's cell."""
    return ", ".join(f"{key}={value}" for key, value in given.items())


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):  # one point, in a process of its own
        measure(*json.loads(sys.argv[1]))
        sys.exit()
    given = parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    write(given, planning())
