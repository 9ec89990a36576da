"""Measure extra memory and time of chunked log-probs beside float32 `log_softmax` and `gather`, forward and backward;
and of log-probs over 50 kept tokens a position, as `rollout.sampling_masks` has them.

    python -m bench.logprobs [--tokens 16384] [--vocab 32768] [--dtype bfloat16] [--threads 2] [--json FILE]

Each is measured in its own process: how far its peak resident memory exceeds the logits, targets and their gradient's
seed, that is, the gradient of the logits (which both must make) and anything else. Both give log-probs with
gradient; ours gives the entropy as well. Time is the fastest of the repeats.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from bench.results import parse, write
from rl_megatron.learner.heads import Kept, token_logprobs

REPEATS, KEPT = 3, 50


def chunked(logits: Tensor, targets: Tensor) -> Tensor:
    """The learner's own."""
    return token_logprobs(logits, targets, temperature=1.0, vocab_size=logits.shape[1])[0]


def over_kept(logits: Tensor, targets: Tensor) -> Tensor:
    """The learner's own, over the target and the tokens after it."""
    count, vocab = len(logits), logits.shape[1]
    tokens = (targets[:, None] + torch.arange(min(KEPT, vocab))) % vocab
    positions = torch.arange(count).repeat_interleave(tokens.shape[1])
    kept = Kept.of(positions, tokens.flatten(), torch.ones(count, dtype=torch.bool), range(vocab))
    return token_logprobs(logits, targets, temperature=1.0, vocab_size=vocab, kept=kept)[0]


def naive(logits: Tensor, targets: Tensor) -> Tensor:
    """A float32 copy of all logits, and autograd."""
    return logits.float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_softmax+gather": naive,
    "chunked": chunked,
    f"over {KEPT} kept tokens": over_kept,
}


def peak_bytes() -> int:
    """Most memory this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(writer: Connection, name: str, tokens: int, vocab: int, dtype: torch.dtype, threads: int) -> None:
    """Send (extra peak bytes, seconds) of one method."""
    torch.set_num_threads(threads)
    small = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    METHODS[name](small, torch.zeros(2, dtype=torch.int64)).sum().backward()  # code is resident before it is counted
    logits = torch.empty(tokens, vocab, dtype=dtype).normal_(generator=torch.Generator().manual_seed(0))
    targets = torch.arange(tokens) % vocab
    logits.requires_grad_()
    seed = torch.ones(tokens)
    before, best = peak_bytes(), float("inf")
    for _ in range(REPEATS):
        logits.grad = None
        start = time.perf_counter()
        METHODS[name](logits, targets).backward(seed)
        best = min(best, time.perf_counter() - start)
    writer.send((peak_bytes() - before, best))


def main() -> None:
    """Measure both and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 16384), ("vocab", 32768), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parse(parser)
    dtype = getattr(torch, args.dtype)
    logits = args.tokens * args.vocab * dtype.itemsize
    print(
        f"{args.tokens} tokens, vocabulary {args.vocab}, {args.dtype}: logits {logits / 2**20:,.0f} MiB; "
        f"{args.threads} threads"
    )
    print(f"{'method':20} {'extra peak MiB':>14} {'over logits':>11} {'seconds':>8}")
    rows = []
    for name in METHODS:
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(writer, name, args.tokens, args.vocab, dtype, args.threads)
        )
        process.start()
        writer.close()
        extra, seconds = reader.recv()
        process.join()
        rows.append({"method": name, "extra_bytes": extra, "logits_bytes": logits, "seconds": seconds})
        print(f"{name:20} {extra / 2**20:14,.0f} {extra / logits:10.2f}x {seconds:8.2f}", flush=True)
    print(
        f"{'naive over chunked':20} {rows[0]['extra_bytes'] / rows[1]['extra_bytes']:13.2f}x "
        f"{rows[0]['seconds'] / rows[1]['seconds']:20.2f}x"
    )
    print(f"{'kept over chunked':20} {rows[2]['seconds'] / rows[1]['seconds']:34.2f}x")
    write(args, rows)


if __name__ == "__main__":
    main()
