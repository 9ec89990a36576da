"""Weights: seconds to plan a 235B model's move, and gloo processes moving a model against one broadcast a tensor.

Run from the repository root: ``python -m bench.plan``. Prints a Markdown table.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from math import prod

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layout import Layout
from rl_megatron.weights.plan import plan
from rl_megatron.weights.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.transports.process_group import ProcessGroupTransport

REPEATS = 5


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


QWEN3_235B = shape(94, 4096, (64, 4, 128), (128, 1536), 151936)
MID = shape(4, 256, (8, 4, 32), (16, 128), 512)
LARGE = shape(8, 1024, (16, 4, 64), (32, 512), 32000)


def planning() -> None:
    """Plan Qwen3-235B from 64 learner ranks to full copies in engines of their own."""
    print("| Qwen3-235B, 64 learner ranks (tp4 pp2 ep8) to | transfers | seconds | max/mean elements a sender |")
    print("| --- | --- | --- | --- |")
    learner = Layout(table=MEGATRON_QWEN3_MOE, shape=QWEN3_235B, dims=ParallelDims(tp=4, pp=2, ep=8, dp=8))
    for engines in (1, 8):
        started = time.perf_counter()
        target = Layout(table=HF_QWEN3_MOE, shape=QWEN3_235B, dims=ParallelDims(dp=engines))
        transfers = plan(learner, target, placement={rank: 64 + rank for rank in range(engines)})
        seconds = time.perf_counter() - started
        load: Counter[int] = Counter()
        for t in transfers:
            load[t.src_rank] += prod(stop - start for start, stop in t.src_box)
        imbalance = max(load.values()) * 64 / load.total()
        print(f"| {engines} full copies | {len(transfers)} | {seconds:.2f} | {imbalance:.4f} |")


def moving(rank: int, port: int) -> None:
    """Expert-parallel learners of two processes, each with a full engine copy: our transport, then broadcasts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if rank == 0:
        print(
            "\n| 2 gloo processes, float32 | model MB | moved MB | plan to buckets s | move s | broadcast a tensor s |"
        )
        print("| --- | --- | --- | --- | --- | --- |")
    for name, model in (("mid", MID), ("large", LARGE)):
        learner = Layout(table=MEGATRON_QWEN3_MOE, shape=model, dims=ParallelDims(ep=2, dp=2))
        engines = Layout(table=HF_QWEN3_MOE, shape=model, dims=ParallelDims(dp=2))
        src = {name: torch.ones(size) for name, size in learner.local_shapes(rank).items()}
        dst = {name: torch.zeros(size) for name, size in engines.local_shapes(rank).items()}
        started = time.perf_counter()
        transport = ProcessGroupTransport(plan(learner, engines), src=src, dst=dst)
        setup = time.perf_counter() - started
        transport.move(0)
        updates = [transport.move(version) for version in range(1, 1 + REPEATS)]
        assert all(bool((tensor == 1).all()) for tensor in dst.values())
        baseline = []
        for _ in range(REPEATS):
            dist.barrier()
            started = time.perf_counter()
            for i, tensor in enumerate(dst.values()):  # what a gather-then-broadcast sync does after its gather
                dist.broadcast(tensor, src=i % 2)
            baseline.append(time.perf_counter() - started)
        if rank == 0:
            total = sum(tensor.numel() * 4 for tensor in dst.values()) / 1e6
            best = min(update.seconds for update in updates)
            moved = updates[0].num_bytes / 1e6
            print(f"| {name} | {total:.0f} | {moved:.0f} | {setup:.2f} | {best:.4f} | {min(baseline):.4f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    planning()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()[1]
    mp.spawn(moving, args=(address,), nprocs=2)
