"""Measure tokens per second of the in-process rollout engine beside transformers' `generate`: same weights, same cores.

    python -m bench.sampler [--size tiny mid] [--threads 2] [--replicas 2] [--repeats 5] [--json FILE]

transformers has all threads in one process. The engine runs as it does beside the learner's ranks: one replica per
process, with its share of the threads and of the prompts; a figure ends when the last replica does.

*equal*: every completion has the full length, one completion a prompt. *group*: 8 completions a prompt. *long tail*:
lengths are geometric with a mean of a quarter of the limit, where finished sequences must leave the batch; tokens
after a stop are not counted. Figures are tokens/s, the fastest of the repeats after one warm-up, the two engines
taking turns so that both see the same machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from bench.results import parse, write
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.types import GenerationRequest, SamplingParams
from rl_megatron.weights.layouts.families import read_shape

# hidden, layers, heads, kv heads, head dim, experts, expert width, vocabulary, batch, the bar
SIZES = {"tiny": (64, 2, 4, 2, 16, 8, 32, 259, 256, 3.0), "mid": (256, 4, 8, 4, 32, 16, 128, 512, 128, 2.0)}
PROMPT_TOKENS = 16


def build(size: str, max_length: int) -> tuple[Qwen3MoeForCausalLM, LocalEngine]:
    """transformers' model and our engine with its weights, the same in every process."""
    hidden, layers, heads, kv_heads, head_dim, experts, width, vocabulary, batch, _ = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=width,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        norm_topk_prob=True,
    )
    theirs = Qwen3MoeForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        shape, checkpoint = read_shape(Path(folder)), load_file(Path(folder) / "model.safetensors")
    ours = LocalEngine(shape, slots=batch, dtype=torch.float32, device="cpu", max_length=max_length)
    for name, tensor in ours.tensors.items():
        tensor.copy_(checkpoint[name])
    return theirs, ours


def main() -> None:
    """Measure the chosen sizes and print one row each per workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    for name, value in (("threads", 2), ("replicas", 2), ("repeats", 5), ("new-tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parse(parser)
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    rows = []
    for size in args.size:
        with replicas_of(size, args.new_tokens, args.replicas, args.threads // args.replicas) as replicas:
            rows += measure(size, args.new_tokens, args.repeats, replicas)
    print(f"{args.threads} threads, {args.replicas} replicas; {PROMPT_TOKENS} prompt and {args.new_tokens} new tokens")
    print(f"{'size':5} {'workload':10} {'batch':>5} {'transformers':>13} {'ours':>9} {'ratio':>6}  bar")
    for row in rows:
        print("{size:5} {workload:10} {batch:5} {transformers:13,.0f} {ours:9,.0f} {ratio:6.2f}  {bar}".format(**row))
    write(args, rows)


@contextmanager
def replicas_of(size: str, new_tokens: int, count: int, threads: int) -> Iterator[list[Connection]]:
    """Pipes to ``count`` engine processes of ``threads`` threads each."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, size, PROMPT_TOKENS + new_tokens, threads)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


def serve(pipe: Connection, size: str, max_length: int, threads: int) -> None:
    """A replica's process: lists of requests in, numbers of sampled tokens out, until the pipe closes."""
    torch.set_num_threads(threads)
    _, engine = build(size, max_length)
    with suppress(EOFError):
        while True:
            answers = engine.generate(pipe.recv())
            pipe.send(sum(len(got.token_ids) for answer in answers for got in answer))


def measure(
    size: str, new_tokens: int, repeats: int, replicas: Sequence[Connection]
) -> list[dict[str, str | int | float]]:
    """One row per workload."""
    theirs, _ = build(size, PROMPT_TOKENS + new_tokens)
    *_, batch, bar = SIZES[size]
    rows: list[dict[str, str | int | float]] = []
    for workload, group, mean in (("equal", 1, None), ("group", 8, None), ("long tail", 8, new_tokens / 4)):
        prompts = torch.randint(0, 256, (batch // group, PROMPT_TOKENS))
        # Random weights sample almost uniformly: the share of stop tokens is the chance to stop.
        vocabulary = theirs.config.vocab_size
        stops = tuple(range(vocabulary - round(vocabulary / mean), vocabulary)) if mean else ()
        slow = transformers_run(theirs, prompts.repeat_interleave(group, 0), new_tokens, stops)
        fast = our_run(replicas, prompts, group, new_tokens, stops)
        for run in (slow, fast):
            run(0)
        rates = [(slow(turn), fast(turn)) for turn in range(1, repeats + 1)]
        best_slow, best_fast = (max(column) for column in zip(*rates, strict=True))
        rows.append(
            {"size": size, "workload": workload, "batch": batch, "transformers": best_slow, "ours": best_fast}
            | {"ratio": best_fast / best_slow, "bar": bar}
        )
    return rows


def transformers_run(
    model: Qwen3MoeForCausalLM, prompts: torch.Tensor, new_tokens: int, stops: tuple[int, ...]
) -> Callable[[int], float]:
    """``generate`` on the prompts [B, L]: seed -> completion tokens per second, none counted after a stop."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        start = time.perf_counter()
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            eos_token_id=list(stops) or None,
        )
        seconds = time.perf_counter() - start
        stopped = torch.isin(ids[:, prompts.shape[1] :], torch.tensor(stops)).cumsum(1)
        return float((stopped.roll(1, 1).index_fill_(1, torch.tensor([0]), 0) == 0).sum()) / seconds

    return run


def our_run(
    replicas: Sequence[Connection], prompts: torch.Tensor, group: int, new_tokens: int, stops: tuple[int, ...]
) -> Callable[[int], float]:
    """The engines on ``group`` completions of each prompt: seed -> completion tokens per second."""

    def run(seed: int) -> float:
        params = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": new_tokens, "stop_token_ids": stops}
        requests = [
            GenerationRequest(
                id=str(row),
                token_ids=tuple(prompt),
                num_completions=group,
                params=SamplingParams(seed=seed * len(prompts) + row, **params),
            )
            for row, prompt in enumerate(prompts.tolist())
        ]
        start = time.perf_counter()
        for number, pipe in enumerate(replicas):
            pipe.send(requests[number :: len(replicas)])
        tokens: int = sum(pipe.recv() for pipe in replicas)
        return tokens / (time.perf_counter() - start)

    return run


if __name__ == "__main__":
    main()
