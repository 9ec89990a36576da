"""Measure CPU seconds of `to_samples` on a step's rollouts, beside a walk over tuples of Python numbers.

    python -m bench.samples [--sequences 4096] [--positions 4700000]

Lengths are lognormal (sigma 0.85) up to 32,768 tokens, 16 completions a prompt of 128 tokens. Both give the same
tensors, which is checked first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from bench.results import parse, write
from rl_megatron.data.samples import single_turns, to_samples
from rl_megatron.types import Completion, Prompt, RolloutGroup, Span

BAR_SECONDS = 0.1
PROMPT, GROUP, LONGEST, VOCABULARY = 128, 16, 32_768, 150_000
Tuples = Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]


def rollouts(sequences: int, positions: int) -> list[RolloutGroup]:
    """Groups whose sequences have ``positions`` positions in total, up to rounding."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(0.0, 0.85, sequences)
    mean = positions / sequences - PROMPT + 1
    lengths = np.clip(drawn / drawn.mean() * mean, 1, LONGEST).astype(np.int64)
    completions = [
        Completion(
            token_ids=rng.integers(0, VOCABULARY, length, dtype=np.int32),
            logprobs=-rng.random(length, dtype=np.float32),
            finish_reason="stop",
            spans=(Span(0, 0),),
        )
        for length in lengths.tolist()
    ]
    return [
        single_turns(Prompt(id=str(i), text="", token_ids=tuple(range(PROMPT)), answer=""), completions[i : i + GROUP])
        for i in range(0, sequences, GROUP)
    ]


def as_tuples(groups: Sequence[RolloutGroup]) -> Tuples:
    """Prompt, tokens and log-probs of every completion."""
    return [
        (group.prompt.token_ids, tuple(row.token_ids[PROMPT:].tolist()), tuple(row.turns[0].logprobs.tolist()))
        for group in groups
        for one in group.trajectories
        for row in one.chains
    ]


def by_a_walk(rows: Tuples) -> dict[str, Tensor]:
    """The same columns from Python numbers, each touched once by C."""
    num_prompt = np.array([len(prompt) for prompt, _, _ in rows])
    num_new = np.array([len(tokens) for _, tokens, _ in rows])
    lengths = num_prompt + num_new
    ends, total = np.cumsum(lengths), int(lengths.sum())
    starts = ends - lengths
    walked = chain.from_iterable(chain(prompt, tokens) for prompt, tokens, _ in rows)
    tokens = np.fromiter(walked, np.int64, total)
    is_new = np.arange(total) >= np.repeat(starts + num_prompt, lengths)
    logprobs = np.zeros(total, np.float32)
    logprobs[is_new] = np.fromiter(chain.from_iterable(said for _, _, said in rows), np.float32, int(num_new.sum()))
    is_input, is_target = np.ones(total, np.bool_), np.ones(total, np.bool_)
    is_input[ends - 1] = is_target[starts] = False
    columns = {"input_ids": tokens[is_input], "targets": tokens[is_target], "mask": is_new[is_target]}
    columns |= {"rollout_logprobs": logprobs[is_target], "old_logprobs": logprobs[is_target]}
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def cpu_seconds(call: Callable[[], object]) -> float:
    """Median of the process's CPU time."""
    taken = []
    for _ in range(5):
        before = time.process_time()
        call()
        taken.append(time.process_time() - before)
    return statistics.median(taken)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=4_700_000)
    args = parse(parser)
    groups = rollouts(args.sequences, args.positions)
    tuples = as_tuples(groups)
    ours, theirs = to_samples(groups), by_a_walk(tuples)
    unlike = [name for name, column in theirs.items() if not torch.equal(column, ours.columns[name])]
    assert not unlike, f"the walk gives other {unlike}"
    seconds = {"to_samples": cpu_seconds(lambda: to_samples(groups)), "tuples": cpu_seconds(lambda: by_a_walk(tuples))}
    print(f"{ours.num_sequences} sequences, {len(ours.mask):,} positions; bar {BAR_SECONDS} s of CPU")
    for name, taken in seconds.items():
        print(f"{name:12} {taken:7.3f} s")
    rows = [{"what": name, "seconds": taken, "bar": BAR_SECONDS} for name, taken in seconds.items()]
    write(args, [{**row, "positions": len(ours.mask)} for row in rows])


if __name__ == "__main__":
    main()
