"""Measure training tokens per second of the megatron learner beside transformers' forward and backward, same weights.

    python -m bench.learner [--size tiny mid] [--threads 2] [--ep 1] [--repeats 7] [--json FILE]

Ours is a whole step: packing into the micro-batch, forward, GSPO loss, backward, gradient norm, clipping, AdamW.
transformers' is forward, cross-entropy and backward alone, on the same sequences as one padded batch, with the
experts implementation that was the fastest here. Tokens are real positions. *equal*: all sequences are equally long;
*long tail*: lengths are geometric, cut at the limit, with a mean of a quarter of it. The two take turns, so that both
see the same machine; figures are medians. With ``--ep N`` ours is N processes that share the threads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM
from transformers.utils import logging

from bench.end_to_end import MID
from bench.results import parse, write
from rl_megatron.algorithms.losses import policy_loss
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Batch, Samples
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE

VOCABULARY = 512
# model, tokens of a batch, length of a sequence (for long tail: the limit is four times as much), the bar
SIZES = {"tiny": (TinySizes(), 10240, 32, 1.0), "mid": (MID, 6144, 128, 1.4)}
GSPO = policy_loss(
    AlgorithmSection(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="seq_mean_token_mean"),
    kl_coefficient=0.0,
    max_new_tokens=1,
)


def make_samples(tokens: int, length: int, *, long_tail: bool) -> Samples:
    """About ``tokens`` random positions in sequences of ``length``, or of that mean and at most four times as long."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.full((tokens // length,), length)
    if long_tail:
        lengths = torch.empty(2 * len(lengths)).geometric_(1 / length, generator=g).long().clamp(2, 4 * length)
        lengths = lengths[: int((lengths.cumsum(0) <= tokens).sum())]
    n = int(lengths.sum())
    return Samples(
        input_ids=torch.randint(0, 256, (n,), generator=g),
        targets=torch.randint(0, 256, (n,), generator=g),
        mask=torch.ones(n, dtype=torch.bool),
        advantages=torch.randn(len(lengths), generator=g).repeat_interleave(lengths),
        rollout_logprobs=torch.full((n,), -6.2),
        old_logprobs=torch.full((n,), -6.2),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
    )


def our_step(folder: Path, samples: Samples, learner: LearnerSection, rank: int, rendezvous: str) -> Callable[[], None]:
    """Fill a learner from the checkpoint; the returned function makes one train step. Every rank calls both."""
    warnings.simplefilter("ignore")  # megatron's imports warn of missing packages
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy

    torch.set_num_threads(learner.threads or 1)
    shape = read_shape(folder)
    device = world.init_process_groups(learner, rank=rank, rendezvous=rendezvous, seed=0)
    megatron = make_policy(shape, learner, device, temperature=1.0)
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=learner.dims)
    hf = Layout(table=HF_QWEN3_MOE, shape=shape)
    read_boxes(HFFolder(folder), hf, layout, rank, dict(megatron.tensors))
    megatron.adopt()
    tokens = len(samples.input_ids)
    batch: Batch = Packer(dims=learner.dims, max_tokens=-(-tokens // learner.dims.dp) + 512).pack(samples)
    mine = tuple(batch.micro_batches[learner.dims.dp_rank(rank)])  # gathered before the clock starts

    def step() -> None:
        torch.set_num_threads(learner.threads or 1)
        megatron.backward(mine, GSPO, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences)
        megatron.step(1e-4)

    return step


def other_rank(folder: Path, samples: Samples, learner: LearnerSection, rank: int, rendezvous: str, steps: int) -> None:
    """A spawned rank: as many steps as rank 0 makes."""
    step = our_step(folder, samples, learner, rank, rendezvous)
    for _ in range(steps):
        step()


def transformers_step(folder: Path, samples: Samples, implementation: str, threads: int) -> Callable[[], None]:
    """Forward, cross-entropy and backward of the sequences, right-padded (causal attention needs no mask for that)."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation=implementation)
    model.train()
    bounds = samples.cu_seqlens.tolist()
    rows = [slice(a, b) for a, b in pairwise(bounds)]
    ids, targets = (
        torch.nn.utils.rnn.pad_sequence([column[row] for row in rows], batch_first=True, padding_value=value)
        for column, value in ((samples.input_ids, 0), (samples.targets, -100))
    )

    def step() -> None:
        torch.set_num_threads(threads)
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    return step


def seconds(step: Callable[[], None]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def fastest_transformers(folder: Path, samples: Samples, threads: int) -> tuple[str, Callable[[], None]]:
    """The experts implementation with the least time in one call after a warm-up."""
    steps = {name: transformers_step(folder, samples, name, threads) for name in ("eager", "grouped_mm")}
    for step in steps.values():
        step()
    name = min(steps, key=lambda name: min(seconds(steps[name]) for _ in range(2)))
    return name, steps[name]


def measure(size: str, workload: str, *, threads: int, ep: int, repeats: int) -> dict[str, str | int | float]:
    """One row: both take turns after a warm-up each. Runs in its own process (a process can join one world)."""
    spec, tokens, length, bar = SIZES[size]
    samples = make_samples(tokens, length, long_tail=workload == "long tail")
    learner = LearnerSection(ep=ep, threads=max(1, threads // ep))
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(spec, Path(scratch), seed=0, vocab_size=VOCABULARY)
        name, theirs = fastest_transformers(folder, samples, threads)
        shared = (f"file://{scratch}/rendezvous", repeats + 2)
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=other_rank, args=(folder, samples, learner, rank, *shared)) for rank in range(1, ep)
        ]
        for process in others:
            process.start()
        ours = our_step(folder, samples, learner, 0, shared[0])
        for _ in range(2):
            ours()
        turns = [(seconds(theirs), seconds(ours)) for _ in range(repeats)]
        for process in others:
            process.join()
    slow, fast = (len(samples.input_ids) / statistics.median(column) for column in zip(*turns, strict=True))
    return {
        "size": size,
        "workload": workload,
        "sequences": samples.num_sequences,
        "tokens": len(samples.input_ids),
        "ep": ep,
        "experts": name,
        "transformers": slow,
        "ours": fast,
        "ratio": fast / slow,
        "bar": bar,
    }


def send_row(writer: Connection, size: str, workload: str, options: dict[str, int]) -> None:
    """What the spawned process runs."""
    writer.send(measure(size, workload, **options))


def main() -> None:
    """Measure the chosen sizes, each workload in a fresh process, and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    for name, value in (("threads", 2), ("ep", 1), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parse(parser)
    options = {"threads": args.threads, "ep": args.ep, "repeats": args.repeats}
    print(f"{args.threads} threads, tokens/s")
    print(
        f"{'size':5} {'workload':10} {'tokens':>6} {'ep':>2} {'experts':>10} {'transformers':>13} {'ours':>8} ratio bar"
    )
    rows = []
    for size in args.size:
        for workload in ("equal", "long tail"):
            reader, writer = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("spawn").Process(
                target=send_row, args=(writer, size, workload, options)
            )
            process.start()
            writer.close()
            rows.append(row := reader.recv())
            process.join()
            print(
                "{size:5} {workload:10} {tokens:6} {ep:2} {experts:>10} {transformers:13,.0f} {ours:8,.0f} "
                "{ratio:5.2f} {bar}".format(**row),
                flush=True,
            )
    write(args, rows)


if __name__ == "__main__":
    main()
