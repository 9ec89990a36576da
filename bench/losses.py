"""Measure the cost of the advantage and loss stages beside their train step, in the same process.

    python -m bench.losses [--threads 2] [--repeats 15] [--json FILE]

The advantage stage is `assign_credit` over a rollout batch of 65,536 tokens, prompts not counted: once a batch, so
its share of one train step is an upper bound. The loss stage is a loss's forward, with all its metrics, and its
backward to the log-probs and the entropy, packed, 65,536 tokens. The train step is the learner's, with GSPO, on fewer
tokens; its time is scaled to 65,536 tokens. GAE is also measured over 8,192 sequences of 1,024 tokens: with all
of them trained, and after prompts of 100 tokens. Times are medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from bench.learner import SIZES, VOCABULARY, make_samples, our_step, seconds
from bench.results import parse, write
from rl_megatron.algorithms.losses import policy_loss
from rl_megatron.algorithms.returns import gae
from rl_megatron.config.sections.algorithm import AlgorithmSection, KLSection
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.samples import single_turns, to_samples
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.training.credit import AlgorithmState, assign_credit, shape_rewards
from rl_megatron.types import Completion, LossInputs, Prompt, RolloutGroup, Span

TOKENS = 65_536
BAR = 0.02  # of a train step
GAE_BAR_SECONDS = 0.05
LOSSES = {
    "gspo": AlgorithmSection(ratio_level="sequence", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": AlgorithmSection(objective="cispo"),
    "grpo": AlgorithmSection(aggregation="seq_mean_token_mean"),
    "ppo with KL": AlgorithmSection(kl=KLSection(coefficient=0.1), entropy_coefficient=0.01),
}
CREDIT = {
    "group (grpo)": AlgorithmSection(),
    "discounted, whitened (reinforce++)": AlgorithmSection(
        advantage_mean="none", advantage_std="none", credit="discounted", gamma=0.99, whiten=True
    ),
    "GAE, whitened (ppo)": AlgorithmSection(advantage_mean="none", advantage_std="none", credit="gae", whiten=True),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: a stage and, where it has one, its bar, both in seconds."""

    stage: str
    what: str
    seconds: float
    bar: float

    def line(self) -> str:
        """A line of the Markdown table."""
        return (
            f"| {self.stage} | {self.what} | {1e3 * self.seconds:.1f} ms | {1e3 * self.bar:.1f} ms | "
            f"{self.seconds / self.bar:.2f} |"
        )


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of ``repeats`` calls, after two that are not counted."""

    def once() -> None:
        call()

    times = [seconds(once) for _ in range(repeats + 2)]
    return statistics.median(times[2:])


def rollouts(length: int) -> list[RolloutGroup]:
    """Groups of 8 completions of ``length`` tokens that make ``TOKENS``, after prompts of 16."""
    completion = Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -1.0, np.float32),
        finish_reason="stop",
        spans=(Span(0, 0),),
    )
    return [
        single_turns(
            Prompt(id=str(i), text="", token_ids=(1,) * 16, answer=""),
            [completion] * 8,
            rewards=[float((i + j) % 3 == 0) for j in range(8)],
        )
        for i in range(TOKENS // length // 8)
    ]


def credit_call(section: AlgorithmSection, length: int) -> Callable[[], object]:
    """The advantage stage over one rollout batch."""
    groups = rollouts(length)
    state = AlgorithmState(kl_coefficient=0.0)
    samples = to_samples(groups)
    g = torch.Generator().manual_seed(0)
    samples = replace(samples, old_values=torch.randn(len(samples.mask), generator=g))
    after = torch.randn(samples.num_sequences, generator=g)

    def call() -> object:
        rewards = shape_rewards(groups, section, state, max_new_tokens=length)
        return assign_credit(samples, groups, rewards, section, success_reward=1.0, next_values=after)

    return call


def loss_call(row: AlgorithmSection, length: int) -> Callable[[], object]:
    """Forward and backward of one packed micro-batch."""
    loss = policy_loss(row, kl_coefficient=row.kl.coefficient, max_new_tokens=length)
    num = TOKENS // length
    g = torch.Generator().manual_seed(0)
    ids = torch.arange(num).repeat_interleave(length)
    old = -torch.rand(TOKENS, generator=g)
    logprobs = (old + 0.01 * torch.randn(TOKENS, generator=g)).requires_grad_()
    entropy = torch.rand(TOKENS, generator=g).requires_grad_()

    def segment_sum(values: Tensor) -> Tensor:
        return values.new_zeros(num).index_add_(0, ids, values)

    inputs = LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=old,
        rollout_logprobs=old + 1e-3,
        ref_logprobs=old - 0.1,
        advantages=torch.randn(num, generator=g)[ids],
        mask=torch.ones(TOKENS, dtype=torch.bool),
        segment_ids=ids,
        segment_sum=segment_sum,
        num_tokens=TOKENS,
        num_sequences=num,
    )

    def call() -> object:
        logprobs.grad = entropy.grad = None
        loss(inputs).loss.backward()
        return logprobs.grad

    return call


def gae_call(prompt: int) -> Callable[[], object]:
    """GAE of 8,192 sequences of 1,024 tokens, the first ``prompt`` of each not trained."""
    num, length = 8192, 1024
    g = torch.Generator().manual_seed(0)
    mask = (torch.arange(length) >= prompt).repeat(num)
    rewards, values = (torch.randn(num * length, generator=g) for _ in range(2))
    bounds, ended = torch.arange(num + 1) * length, torch.zeros(num, dtype=torch.bool)
    after = torch.zeros(num)

    def call() -> object:
        return gae(rewards, values, mask, bounds, next_values=after, truncated=ended, gamma=0.99, lam=0.95)

    return call


def measure(size: str, threads: int, repeats: int) -> list[Row]:
    """All rows against the train step of one size."""
    spec, tokens, length, _ = SIZES[size]
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(spec, Path(scratch), seed=0, vocab_size=VOCABULARY)
        samples = make_samples(tokens, length, long_tail=False)
        step = our_step(folder, samples, LearnerSection(threads=threads), 0, f"file://{scratch}/rendezvous")
        scale = TOKENS / len(samples.input_ids)
        train = scale * median_seconds(step, max(3, repeats // 3))
        bar = BAR * train
        stages = [(f"loss, {size}", name, loss_call(row, length)) for name, row in LOSSES.items()]
        stages += [(f"advantage, {size}", name, credit_call(section, length)) for name, section in CREDIT.items()]
        rows = [Row(stage, what, median_seconds(call, repeats), bar) for stage, what, call in stages]
    if size == "mid":
        rows += [
            Row("GAE, 8,192 x 1,024", what, median_seconds(gae_call(prompt), repeats), GAE_BAR_SECONDS)
            for what, prompt in (("all trained", 0), ("behind prompts", 100))
        ]
    return [Row("train step", size, train, train), *rows]


def send_rows(writer: Connection, size: str, threads: int, repeats: int) -> None:
    """Entry point of the spawned process, since a process can join only one world."""
    writer.send(measure(size, threads, repeats))


def main() -> None:
    """Measure against both sizes, each in a fresh process, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    args = parse(parser)
    print(f"{args.threads} threads\n")
    print("| stage | what | time | bar | time / bar |\n|---|---|---|---|---|")
    rows: list[Row] = []
    for size in SIZES:
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=send_rows, args=(writer, size, args.threads, args.repeats)
        )
        process.start()
        writer.close()
        found: list[Row] = reader.recv()
        process.join()
        for row in found:
            print(row.line(), flush=True)
        rows += found
    write(args, [{"stage": r.stage, "what": r.what, "seconds": r.seconds, "bar": r.bar} for r in rows])


if __name__ == "__main__":
    main()
