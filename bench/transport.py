"""Time a weight sync by each transport, with and without digests, against gather-and-broadcast in the same processes.

Run from the repository root: ``python -m bench.transport [--json FILE]``. Four learner ranks (TP2, EP2) fill two engine
ranks (TP2), six processes in all. Prints what one core and one connection can do, then a Markdown table: medians of
``REPEATS`` rounds (the baseline's: ``BASELINE_REPEATS``), all methods in turns in each; seconds are from a barrier to a
barrier, CPU seconds the sum over the processes. The baseline has no conversion and no copies into an engine: each
learner rank gathers every parameter over its TP and EP groups, rank 0 broadcasts all of it to the engine ranks, in
buckets or tensor by tensor; ratios are to the faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.plan import LARGE, MID
from bench.results import parse, write
from launcher.processes.guards import held_ports
from rl_megatron.features.sparse.changes import Changes
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables import grouped_query
from rl_megatron.weights.plans.plan import plan
from rl_megatron.weights.routes.ends import PIECE_BYTES, digest
from rl_megatron.weights.routes.group import ProcessGroupTransport, Transport

REPEATS, BASELINE_REPEATS = 9, 3
BAR = 0.35  # of the baseline's seconds
DTYPE = torch.bfloat16
LEARNER, ENGINE = ParallelDims(tp=2, ep=2, dp=2), ParallelDims(tp=2, etp=2)
LEARNERS, ENGINES = LEARNER.world_size, ENGINE.world_size
BUCKET_BYTES, BASELINE_BYTES = 64 * 2**20, 8 * 2**20  # each at its best: 64 MiB makes the baseline slower


class GatherAndBroadcast:
    """Every learner rank materializes every parameter, rank 0 sends all of it to every engine rank."""

    def __init__(self, learner: Layout, rank: int, src: Mapping[str, Tensor], bucket_bytes: int) -> None:
        self._rank, self._src = rank, src
        make = dist.new_group  # every process makes every group
        tp = [make(list(ranks)) for ranks in ((0, 1), (2, 3))]
        ep = [make(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))]
        self._out = make([0, *range(LEARNERS, LEARNERS + ENGINES)])
        ranks_of_ep = [dist.get_process_group_ranks(group) for group in ep]
        experts = [learner.expert_rank(spec, 0) for spec in learner.rows() if "{expert}" in spec.name]
        assert experts
        coordinate = [rank % (LEARNER.tp * LEARNER.dp) // LEARNER.etp % LEARNER.ep for rank in range(LEARNERS)]
        self._tp = tp[rank // 2] if rank < LEARNERS else None
        self._ep = next(
            (g for g, r in zip(ep, ranks_of_ep, strict=True) if rank in r and coordinate[r[0]] != coordinate[r[1]]),
            None,
        )
        self._buckets = self._cut(learner, bucket_bytes)
        largest = max(elements for _, _, elements in self._buckets)
        self._mine, self._whole = torch.zeros(largest, dtype=DTYPE), torch.zeros(2 * largest, dtype=DTYPE)

    def _cut(self, learner: Layout, bucket_bytes: int) -> Sequence[tuple[str, list[str], int]]:
        """(over which axis to gather, a rank's tensors, their elements); the same number on every rank."""
        whole = {name: prod(size) for name, size in learner.local_shapes(0).items()}
        kinds: dict[str, list[str]] = {"ep": [], "tp": [], "none": []}
        for name in learner.local_shapes(min(self._rank, LEARNERS - 1)):
            replicated = "norm" in name or "router" in name
            kinds["ep" if ".experts." in name else "none" if replicated else "tp"].append(name)
        sizes = {**{name: prod(size) for name, size in learner.local_shapes(LEARNERS - 1).items()}, **whole}
        for rank in range(LEARNERS):
            sizes |= {name: prod(size) for name, size in learner.local_shapes(rank).items()}
        out: list[tuple[str, list[str], int]] = []
        for kind, names in kinds.items():
            for name in names:
                if not out or out[-1][0] != kind or (out[-1][2] + sizes[name]) * 2 * DTYPE.itemsize > bucket_bytes:
                    out.append((kind, [], 0))
                out[-1] = (kind, [*out[-1][1], name], out[-1][2] + sizes[name])
        return out

    def move(self) -> None:
        """Move the whole model once."""
        for kind, names, elements in self._buckets:
            mine, whole = self._mine[:elements], self._whole[: elements if kind == "none" else 2 * elements]
            if self._rank < LEARNERS:
                torch.cat([self._src[name].view(-1) for name in names], out=whole if kind == "none" else mine)
                if kind != "none":
                    dist.all_gather(list(whole.chunk(2)), mine, group=self._tp if kind == "tp" else self._ep)
            if self._rank == 0 or self._rank >= LEARNERS:
                dist.broadcast(whole, src=0, group=self._out)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(seconds from a barrier to a barrier, CPU seconds of all processes)."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.barrier()
    wall = time.perf_counter() - wall
    dist.all_reduce(spent)
    return wall, float(spent)


def floors(rank: int) -> None:
    """Print any transport's minimum cost here: copies by one core, XXH3 of cached pieces, one stream over loopback."""
    piece, total = torch.ones(PIECE_BYTES, dtype=torch.uint8), 512 * 2**20
    if rank == 0:
        memory = torch.ones(total // PIECE_BYTES, PIECE_BYTES, dtype=torch.uint8)
        works: dict[str, Callable[[], object]] = {
            "packs": lambda: [piece.copy_(row) for row in memory],
            "unpacks": lambda: [row.copy_(piece) for row in memory],
            "digests": lambda: [digest(memoryview(piece.numpy())) for _ in memory],
        }
        rates = []
        for what, work in works.items():
            seconds = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - started)
            rates.append(f"{what} {total / statistics.median(seconds) / 1e9:.0f} GB/s")
        print(f"one core {', '.join(rates)}", flush=True)
    dist.barrier()
    buffer, seconds = torch.ones(BUCKET_BYTES, dtype=torch.uint8), []
    for _ in range(2 * REPEATS):
        dist.barrier()
        started = time.perf_counter()
        if rank == 0:
            dist.send(buffer, LEARNERS)
        elif rank == LEARNERS:
            dist.recv(buffer, 0)
            seconds.append(time.perf_counter() - started)
    if rank == LEARNERS:
        print(f"gloo, one pair: {BUCKET_BYTES / statistics.median(seconds) / 1e9:.1f} GB/s\n", flush=True)
    dist.barrier()


def change(src: Mapping[str, Tensor]) -> None:
    """Change three elements in a hundred."""
    for tensor in src.values():
        tensor.view(-1)[::33] += 1


def measure(rank: int, name: str, model: ModelShape) -> list[dict[str, object]]:
    """A model's rows, printed and given by rank 0."""
    learner = Layout(table=grouped_query.MEGATRON_QWEN3_MOE, shape=model, dims=LEARNER)
    engine = Layout(table=grouped_query.ENGINE_QWEN3_MOE, shape=model, dims=ENGINE)
    moves = plan(learner, engine, placement={r: LEARNERS + r for r in range(ENGINES)})
    held = learner.local_shapes(rank) if rank < LEARNERS else {}
    wanted = engine.local_shapes(rank - LEARNERS) if rank >= LEARNERS else {}
    src = {n: torch.full(size, rank + 1.0, dtype=DTYPE) for n, size in held.items()}
    dst = {n: torch.zeros(size, dtype=DTYPE) for n, size in wanted.items()}
    whole = Layout(table=grouped_query.HF_QWEN3_MOE, shape=model).local_shapes(0)
    total = DTYPE.itemsize * sum(prod(size) for size in whole.values())
    moved = DTYPE.itemsize * sum(moves.traffic().values())
    transports: dict[str, Transport] = {
        "gloo": ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=BUCKET_BYTES, verify=False),
        "gloo, digests": ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=BUCKET_BYTES),
        "gloo, digests, 3 % changed": ProcessGroupTransport(
            moves, src=src, dst=dst, bucket_bytes=BUCKET_BYTES, compression=Changes()
        ),
    }
    calls: dict[str, Callable[[], object]] = {
        "gather and broadcast, buckets": GatherAndBroadcast(learner, rank, src, BASELINE_BYTES).move,
        "gather and broadcast, tensors": GatherAndBroadcast(learner, rank, src, 1).move,
    }
    calls |= {kind: lambda transport=transport: transport.move(0) for kind, transport in transports.items()}
    seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in calls}
    for round_ in range(1 + REPEATS):
        for kind, call in calls.items():
            if kind.startswith("gather") and round_ > BASELINE_REPEATS:
                continue
            change(src)
            spent = timed(call)
            if round_:  # the first touches all memory
                seen[kind].append(spent)
    medians = {kind: [statistics.median(column) for column in zip(*rows, strict=True)] for kind, rows in seen.items()}
    base = min(medians[kind] for kind in calls if kind.startswith("gather"))
    rows: list[dict[str, object]] = []
    if rank == 0:
        for kind, (wall, cpu) in medians.items():
            ratios = f"{wall:.4f} | {wall / base[0]:.2f} | {BAR} | {cpu:.3f} | {cpu / base[1]:.2f}"
            print(f"| {name}, {total / 1e6:.0f} MB, {moved / 1e6:.0f} MB moved | {kind} | {ratios} |", flush=True)
            rows.append({"model": name, "bytes": total, "moved": moved, "method": kind, "seconds": wall})
            rows[-1] |= {"ratio": wall / base[0], "bar": BAR, "cpu_seconds": cpu}
    for transport in transports.values():
        transport.close()
    return rows


def process(rank: int, port: int, args: argparse.Namespace) -> None:
    """Run one of the six processes."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=LEARNERS + ENGINES)
    floors(rank)
    if rank == 0:
        print(f"| model | method | seconds | ratio | bar | CPU seconds | ratio |\n|{' --- |' * 7}")
    rows = [row for name, model in (("mid", MID), ("large", LARGE)) for row in measure(rank, name, model)]
    if rank == 0:
        write(args, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    with held_ports("127.0.0.1") as chosen:
        mp.spawn(process, args=(chosen, given), nprocs=LEARNERS + ENGINES)
