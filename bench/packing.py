"""Measure packing of a lognormal mix of sequences: balance, padding and time, beside two simple packers.

    python -m bench.packing [--sequences 4096] [--dp 8] [--cp 2] [--tp 2]

*rank*, *micro-batch*: heaviest / mean work. *lockstep*: time lost when the D ranks of one micro-batch index wait for
each other (expert parallelism). *bound*: the micro-batch figure that the longest sequence alone forces; if it
is above the bar, no packing of whole sequences meets it. *plan* is the assignment; *assemble* also copies the tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from bench.results import parse, write
from rl_megatron.data.packing import Packer, causal_attention_cost, padded_lengths, plan_packing, sequence_work
from rl_megatron.types import ParallelDims, Samples

Plan = list[list[NDArray[np.int64]]]
IMBALANCE_BAR, PLAN_SECONDS_BAR, PADDING_BAR = 1.02, 0.050, 0.01
MAX_LENGTH = 32768
MIXES = {"median 2k, sigma 1.0": (2000, 1.0), "median 3k, sigma 0.8": (3000, 0.8), "median 6k, sigma 0.7": (6000, 0.7)}
# (active parameters that multiply a token, num_layers * num_heads * head_dim)
MODELS = {"30B-A3B": (3.04e9, 48 * 32 * 128), "235B-A22B": (21.5e9, 94 * 64 * 128)}


def first_fit(lengths: NDArray[np.int64], *, dims: ParallelDims, max_tokens: int) -> Plan:
    """In order of arrival, into the first micro-batch with room; micro-batches then dealt to the ranks in turn."""
    bins: list[list[int]] = []
    rooms = np.zeros(len(lengths), np.int64)
    for i, size in enumerate(padded_lengths(lengths, dims)):
        rooms[len(bins) :] = max_tokens
        b = int(np.argmax(rooms >= size))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        rooms[b] -= size
    bins += [[] for _ in range(-len(bins) % dims.dp)]
    return [[np.array(part, np.int64) for part in bins[rank :: dims.dp]] for rank in range(dims.dp)]


def round_robin(lengths: NDArray[np.int64], *, dims: ParallelDims, max_tokens: int) -> Plan:
    """Sequence i to rank i mod D; each rank fills one micro-batch after the other; empty ones make M equal."""
    sizes = padded_lengths(lengths, dims)
    plan = []
    for rank in range(dims.dp):
        rows: list[list[int]] = [[]]
        used = 0
        for i in range(rank, len(lengths), dims.dp):
            if used + sizes[i] > max_tokens:
                rows.append([])
                used = 0
            rows[-1].append(i)
            used += sizes[i]
        plan.append([np.array(row, np.int64) for row in rows])
    most = max(map(len, plan))
    return [row + [np.empty(0, np.int64)] * (most - len(row)) for row in plan]


def figures(plan: Plan, work: NDArray[np.float64]) -> tuple[int, float, float, float]:
    """M, and work max/mean over ranks, over micro-batches and in lockstep."""
    totals = np.array([[work[ids].sum() for ids in row] for row in plan])
    ranks, num_micro = totals.sum(1), totals.shape[1]
    lockstep = totals.max(0).sum() / num_micro / totals.mean()
    return num_micro, ranks.max() / ranks.mean(), totals.max() / totals.mean(), lockstep


def padding_waste(plan: Plan, lengths: NDArray[np.int64], dims: ParallelDims) -> float:
    """Padded positions that hold nothing, as a share of all: sequences to 2 * cp, micro-batches to tp * 2 * cp."""
    unit = dims.tp * (2 * dims.cp if dims.cp > 1 else 1)
    padded = padded_lengths(lengths, dims)
    total = sum(-(-int(padded[ids].sum()) // unit) * unit for row in plan for ids in row)
    return 1 - lengths.sum() / total


def best_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Fastest of ``repeats`` calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def random_samples(lengths: NDArray[np.int64]) -> Samples:
    """A ragged batch with these lengths."""
    n = int(lengths.sum())
    tokens = torch.randint(0, 1000, (n,))
    return Samples(
        input_ids=tokens,
        targets=tokens.roll(-1),
        mask=torch.ones(n, dtype=torch.bool),
        advantages=torch.randn(n),
        rollout_logprobs=torch.randn(n),
        old_logprobs=torch.randn(n),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))),
    )


def main() -> None:
    """Print the table; the bars are checked where a packing of whole sequences can meet them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("sequences", 4096), ("dp", 8), ("cp", 2), ("tp", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parse(parser)
    dims = ParallelDims(dp=args.dp, cp=args.cp, tp=args.tp)
    missed, rows = [], list[dict[str, object]]()
    print(f"{args.sequences} sequences up to {MAX_LENGTH} tokens, dp={args.dp} cp={args.cp} tp={args.tp}")
    print(f"{'mix':21} {'model':10} {'budget':>6} {'packer':12} {'M':>4} {'rank':>7} {'micro-b.':>8} {'lockstep':>8} "
          f"{'bound':>6} {'padding':>8} {'plan ms':>8}")  # fmt: skip
    for mix, (median, sigma) in MIXES.items():
        drawn = np.random.default_rng(args.seed).lognormal(np.log(median), sigma, args.sequences)
        lengths = np.clip(drawn, 64, MAX_LENGTH).astype(np.int64)
        for model, (linear, width) in MODELS.items():
            cost = causal_attention_cost(linear_parameters=linear, attention_width=width)
            work = sequence_work(lengths, cost)
            for budget in (MAX_LENGTH, 2 * MAX_LENGTH):
                packers: dict[str, Callable[[], Plan]] = {
                    "first fit": lambda n=lengths, b=budget: first_fit(n, dims=dims, max_tokens=b),
                    "round robin": lambda n=lengths, b=budget: round_robin(n, dims=dims, max_tokens=b),
                    "ours": lambda n=lengths, b=budget, c=cost: plan_packing(
                        n, dims=dims, max_tokens=b, attention_cost=c
                    ),
                }
                for packer, make in packers.items():
                    plan, seconds = make(), best_seconds(make)
                    num_micro, rank, micro, lockstep = figures(plan, work)
                    bound = max(1.0, work.max() * args.dp * num_micro / work.sum())
                    waste = padding_waste(plan, lengths, dims)
                    print(f"{mix:21} {model:10} {budget:6} {packer:12} {num_micro:4} {rank:7.4f} {micro:8.4f} "
                          f"{lockstep:8.4f} {bound:6.3f} {waste:8.3%} {seconds * 1e3:8.1f}")  # fmt: skip
                    rows.append({"mix": mix, "model": model, "budget": budget, "packer": packer})
                    rows[-1] |= {"rank": rank, "micro": micro, "lockstep": lockstep, "bound": bound}
                    rows[-1] |= {"padding": waste, "seconds": seconds}
                    attainable = micro <= IMBALANCE_BAR or bound > IMBALANCE_BAR
                    within = (
                        max(rank, lockstep) <= IMBALANCE_BAR and waste <= PADDING_BAR and seconds <= PLAN_SECONDS_BAR
                    )
                    if packer == "ours" and not (attainable and within):
                        missed.append((mix, model, budget))
    samples = random_samples(lengths)
    seconds = best_seconds(lambda: Packer(dims=dims, max_tokens=2 * MAX_LENGTH, attention_cost=cost).pack(samples), 2)
    print(f"plan and assemble {int(lengths.sum()):,} positions: {seconds * 1e3:.0f} ms")
    print(
        f"bars: imbalance {IMBALANCE_BAR}, padding {PADDING_BAR:.1%}, {PLAN_SECONDS_BAR} s; missed: {missed or 'none'}"
    )
    write(args, rows)


if __name__ == "__main__":
    main()
