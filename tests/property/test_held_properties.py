"""Micro-batches that ranks build from what they were sent are those gathered in the controller, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.data.held import HeldRows
from rl_megatron.data.packing import Packer
from rl_megatron.data.samples import as_seen, seen_by, select, to_samples
from rl_megatron.data.sent import Sent
from rl_megatron.data.shares import Share
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import RLMegatronError
from rl_megatron.types import Batch, Completion, ParallelDims, Prompt, RolloutGroup, Samples, Span

# rows of each prompt: the prompt's tokens, and the sampled ones of each completion
PROMPTS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=6
)
KINDS = ("constant", "random", "zeros", "minus zero", "everywhere")


def rollouts(sizes: list[tuple[int, list[int]]], seed: int) -> list[RolloutGroup]:
    rng = np.random.default_rng(seed)
    return [
        single_turns(
            Prompt(id=str(i), text="", token_ids=tuple(rng.integers(0, 200_000, prompt).tolist()), answer=""),
            [
                Completion(
                    token_ids=rng.integers(0, 200_000, length, dtype=np.int32),
                    logprobs=-rng.random(length, dtype=np.float32),
                    finish_reason="stop",
                    spans=(Span(0, 0),),
                )
                for length in lengths
            ],
        )
        for i, (prompt, lengths) in enumerate(sizes)
    ]


def column(samples: Samples, kind: str, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    n, of_rows = len(samples.mask), torch.randn(samples.num_sequences, generator=g)
    everywhere = torch.repeat_interleave(of_rows, samples.cu_seqlens.diff())
    return {
        "constant": everywhere * samples.mask,
        "random": torch.randn(n, generator=g),
        "zeros": torch.zeros(n),
        "minus zero": -torch.zeros(n),
        "everywhere": everywhere,
    }[kind]


def scored(samples: Samples, kinds: list[str], seed: int) -> Samples:
    """With columns as a step computes them, a routing of three layers, and perhaps targets that are no next inputs."""
    g = torch.Generator().manual_seed(seed)
    routes = torch.randint(0, 8, (len(samples.mask), 3, 2), generator=g).to(torch.uint8)
    names = ("advantages", "old_logprobs", "ref_logprobs", "returns", "proximal_share", "nll_weights", "token_weight")
    chosen = {name: column(samples, kind, seed + i) for i, (name, kind) in enumerate(zip(names, kinds, strict=False))}
    mask = samples.mask & (torch.rand(len(samples.mask), generator=g) > 0.1)
    targets = samples.targets.flip(0) if seed % 2 else samples.targets
    turns = torch.randint(0, 3, (len(samples.mask),), generator=g, dtype=torch.int32) if seed % 3 else None
    top = torch.randn(len(mask), 2, 3, generator=g) if seed % 5 else None
    if top is not None and seed % 7:
        top[~mask] = 0
    return replace(samples, **chosen, targets=targets, routes=routes, mask=mask, turn_of=turns, ref_top=top)


def bits(samples: Samples) -> dict[str, bytes]:
    every = {**samples.columns, "cu_seqlens": samples.cu_seqlens}
    return {name: f"{c.dtype} {tuple(c.shape)} ".encode() + c.numpy().tobytes() for name, c in every.items()}


@settings(deadline=None, max_examples=25)
@given(
    PROMPTS,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.lists(st.sampled_from(KINDS), min_size=2, max_size=7),
    st.integers(0, 2**31),
)
def test_ranks_build_what_the_controller_would_have_sent(
    sizes: list[tuple[int, list[int]]], dp: int, most: int, epochs: int, kinds: list[str], seed: int
) -> None:
    """A step as the update makes it: a score, a critic's values, and minibatches with columns computed since."""
    sampled = to_samples(rollouts(sizes, seed))
    packer = Packer(dims=ParallelDims(dp=dp), max_tokens=20, attention_cost=0.1)
    sent, held = Sent(dp), [HeldRows() for _ in range(dp)]

    def taken(batch: Batch, *, to_score: bool) -> list[tuple[Samples, ...]]:
        shares = sent.shares(batch, to_score=to_score)
        return [rank.take(share, range(3)) for rank, share in zip(held, shares, strict=True)]

    ranks = packer.ranks(sampled, most=most, seed=seed)
    batch = packer.pack(sampled, ranks=ranks)
    for row, numbers in zip(taken(batch, to_score=True), batch.sequences, strict=True):
        for found, ids in zip(row, numbers, strict=True):
            if len(ids):
                whole = select(sampled, ids)
                assert bits(found) == bits(
                    replace(whole, rollout_logprobs=found.advantages, old_logprobs=found.advantages)
                )
    shared = packer.pack(sampled, ranks=ranks, with_room=True)
    values = seen_by(shared, replays=False, last_tokens=True)
    assert values.micro_batches[0][0].cu_seqlens.diff().sum() <= packer.max_tokens
    for row, wanted in zip(taken(shared, to_score=True), values.micro_batches, strict=True):
        seen = [as_seen(found, replays=False, last_tokens=True) for found in row]
        assert [bits(found) for found in seen] == [bits(one) for one in wanted]
    trained = scored(sampled, kinds, seed)
    for minibatch in packer.minibatches(trained, most=most, seeds=[seed + e for e in range(epochs)]):
        for row, wanted in zip(taken(minibatch, to_score=False), minibatch.micro_batches, strict=True):
            assert [bits(found) for found in row] == [bits(one) for one in wanted]


def of_size(prompts: int, group: int, length: int) -> Samples:
    return to_samples(rollouts([(length // 4, [length] * group)] * prompts, 0))


def bytes_of(shares: list[Share]) -> int:
    return sum(len(share) for share in shares)


def test_a_step_costs_its_columns_once_and_little_more() -> None:
    """Tokens are 4 bytes, sampled log-probs 4 each, what a pass computes 4 a position; the rest is within 5 %."""
    samples, dp = of_size(16, 8, 400), 4
    packer = Packer(dims=ParallelDims(dp=dp), max_tokens=4000, attention_cost=0.0)
    sent = Sent(dp)
    moved = bytes_of(sent.shares(packer.pack(samples, ranks=packer.ranks(samples, most=2, seed=5)), to_score=True))
    trained = replace(
        samples,
        old_logprobs=torch.randn(len(samples.mask)),
        advantages=torch.repeat_interleave(torch.randn(samples.num_sequences), samples.cu_seqlens.diff())
        * samples.mask,
    )
    for batch in packer.minibatches(trained, most=2, seeds=[5]):
        moved += bytes_of(sent.shares(batch, to_score=False))
    tokens = len(samples.input_ids) + samples.num_sequences
    columns = 4 * (tokens + int(samples.mask.sum()) + len(samples.mask))
    assert columns < moved <= 1.05 * columns


def test_rows_that_were_not_sent_are_named() -> None:
    samples = of_size(2, 2, 8)
    batch = Packer(dims=ParallelDims(), max_tokens=100, attention_cost=0.0).pack(samples)
    sent, held = Sent(1), HeldRows()
    held.take(sent.shares(batch, to_score=True)[0])
    (again,) = sent.shares(batch, to_score=True)
    held.forget()
    assert held.num_bytes == 0
    with pytest.raises(RLMegatronError, match="'input_ids' of rows 0, 1, 2, 3 of batch 1, 4 in all, which it was not"):
        held.take(again)


def test_the_next_steps_rows_replace_this_ones() -> None:
    packer, sent, held = Packer(dims=ParallelDims(), max_tokens=100, attention_cost=0.0), Sent(1), HeldRows()
    sizes = []
    for seed in range(3):
        samples = to_samples(rollouts([(4, [8, 8])], seed))
        held.take(sent.shares(packer.pack(samples), to_score=True)[0])
        sizes.append(held.num_bytes)
    assert sizes[0] == sizes[2] > 0
