"""Batches, micro-batches and shares of sources: each equals the result of a plain loop, to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rl_megatron.data.packing import Packer
from rl_megatron.data.problems.mixture import MixtureState, Proportions
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.rows import RankRows, SentRows, Share
from rl_megatron.data.samples import for_pass, micro_batch_for_pass, select, single_turns, to_samples
from rl_megatron.errors import RLMegatronError
from rl_megatron.types import (
    Batch,
    Completion,
    ParallelDims,
    Prompt,
    RolloutGroup,
    Samples,
    Span,
    TokenSequence,
    Trajectory,
    Turn,
)

TOKEN, LOGPROB = st.integers(0, 2**31 - 1), st.floats(-1000, 0.0, width=32)
GIVEN, SAMPLED = st.tuples(TOKEN, st.none()), st.tuples(TOKEN, LOGPROB)
CONTEXT, TURN = st.lists(GIVEN, min_size=1, max_size=6), st.lists(SAMPLED, min_size=1, max_size=8)
Said = list[tuple[int, float | None]]
Row = tuple[list[tuple[Said, Said]], Said]  # context and turn, as often as it likes, and what stands behind the last
ROW = st.tuples(st.lists(st.tuples(CONTEXT, TURN), min_size=1, max_size=3), st.lists(GIVEN, max_size=3))
GROUPS = st.lists(st.lists(st.lists(ROW, min_size=1, max_size=2), min_size=1, max_size=3), min_size=1, max_size=4)


def chain(row: Row) -> TokenSequence:
    pairs, rest = row
    tokens, turns = list[int](), list[Turn]()
    for context, said in pairs:
        tokens += [token for token, _ in context]
        logprobs = np.array([logprob for _, logprob in said], np.float32)
        turns.append(Turn(start=len(tokens), logprobs=logprobs, finish_reason="stop", spans=(Span(0, 0),), text=""))
        tokens += [token for token, _ in said]
    return TokenSequence(token_ids=np.array([*tokens, *(token for token, _ in rest)], np.int32), turns=tuple(turns))


def group(trajectories: list[list[Row]]) -> RolloutGroup:
    made = [Trajectory(chains=tuple(map(chain, rows)), reward=0.0) for rows in trajectories]
    return RolloutGroup(prompt=Prompt(id="p", text="", token_ids=(), answer=""), trajectories=tuple(made))


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_samples_are_those_of_a_loop_over_tokens(groups: list[list[list[Row]]]) -> None:
    inputs, targets, mask, logprobs, bounds = [], [], [], [], [0]
    for pairs, rest in (row for trajectories in groups for rows in trajectories for row in rows):
        whole = [*(one for pair in pairs for part in pair for one in part), *rest]
        for (before, _), (token, said) in pairwise(whole):
            inputs.append(before)
            targets.append(token)
            mask.append(said is not None)
            logprobs.append(0.0 if said is None else said)
        bounds.append(len(inputs))
    samples = to_samples([group(trajectories) for trajectories in groups])
    assert samples.input_ids.tolist() == inputs
    assert samples.targets.tolist() == targets
    assert samples.mask.tolist() == mask
    assert samples.rollout_logprobs.numpy().tobytes() == np.array(logprobs, np.float32).tobytes()
    assert samples.old_logprobs.numpy().tobytes() == np.array(logprobs, np.float32).tobytes()
    assert samples.cu_seqlens.tolist() == bounds
    assert torch.equal(samples.advantages, torch.zeros(len(inputs)))


# Micro-batches that ranks build from what they were sent are those gathered in the controller, to the bit.
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
    return replace(samples, **chosen, targets=targets, extra={"routes": routes}, mask=mask, turn_of=turns, ref_top=top)


def bits(samples: Samples) -> dict[str, bytes]:
    every = {**samples.every_column, "cu_seqlens": samples.cu_seqlens}
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
    sent, held = SentRows(dp), [RankRows() for _ in range(dp)]

    def taken(batch: Batch, *, to_score: bool) -> list[tuple[Samples, ...]]:
        shares = sent.shares(batch, to_score=to_score)
        return [rank.micro_batches(share, {"routes": (0, 1, 2)}) for rank, share in zip(held, shares, strict=True)]

    ranks = packer.ranks(sampled, limit=most, seed=seed)
    batch = packer.pack(sampled, ranks=ranks)
    for row, numbers in zip(taken(batch, to_score=True), batch.sequences, strict=True):
        for found, ids in zip(row, numbers, strict=True):
            if len(ids):
                whole = select(sampled, ids)
                assert bits(found) == bits(
                    replace(whole, rollout_logprobs=found.advantages, old_logprobs=found.advantages)
                )
    shared = packer.pack(sampled, ranks=ranks, with_room=True)
    values = for_pass(shared, replays=False, last_tokens=True)
    assert values.micro_batches[0][0].cu_seqlens.diff().sum() <= packer.max_tokens
    for row, wanted in zip(taken(shared, to_score=True), values.micro_batches, strict=True):
        seen = [micro_batch_for_pass(found, replays=False, last_tokens=True) for found in row]
        assert [bits(found) for found in seen] == [bits(one) for one in wanted]
    trained = scored(sampled, kinds, seed)
    for minibatch in packer.minibatches(trained, limit=most, seeds=[seed + e for e in range(epochs)]):
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
    sent = SentRows(dp)
    moved = bytes_of(sent.shares(packer.pack(samples, ranks=packer.ranks(samples, limit=2, seed=5)), to_score=True))
    advantages = torch.repeat_interleave(torch.randn(samples.num_sequences), samples.cu_seqlens.diff()) * samples.mask
    trained = replace(samples, old_logprobs=torch.randn(len(samples.mask)), advantages=advantages)
    for batch in packer.minibatches(trained, limit=2, seeds=[5]):
        moved += bytes_of(sent.shares(batch, to_score=False))
    columns = 4 * ((len(samples.input_ids) + samples.num_sequences) + int(samples.mask.sum()) + len(samples.mask))
    assert columns < moved <= 1.05 * columns


def test_a_rank_gets_the_routes_of_its_own_rows_alone_and_once() -> None:
    """Of 64 bytes a position they are most of a step's bytes: all of them on each rank fill a host's memory."""
    samples, dp = of_size(16, 8, 100), 4
    routes = torch.randint(0, 128, (len(samples.mask), 8, 8), generator=torch.Generator().manual_seed(1))
    routed, packer = (
        replace(samples, extra={"routes": routes.to(torch.uint8)}),
        Packer(dims=ParallelDims(dp=dp), max_tokens=4000, attention_cost=0.0),
    )
    ranks, extra = packer.ranks(samples, limit=2, seed=5), [0] * dp
    for one, sign in ((routed, 1), (samples, -1)):
        sent, trained = SentRows(dp), replace(one, old_logprobs=torch.ones(len(one.mask)))
        batches = [packer.pack(one, ranks=ranks), *packer.minibatches(trained, limit=2, seeds=[5])]
        for number, batch in enumerate(batches):
            shares = sent.shares(batch, to_score=number == 0)
            extra = [bytes + sign * len(share) for bytes, share in zip(extra, shares, strict=True)]
    assert sum(extra) <= 1.02 * routes.numel()
    assert max(extra) <= 1.1 * routes.numel() / dp


def test_rows_that_were_not_sent_are_named() -> None:
    samples = of_size(2, 2, 8)
    batch = Packer(dims=ParallelDims(), max_tokens=100, attention_cost=0.0).pack(samples)
    sent, held = SentRows(1), RankRows()
    held.micro_batches(sent.shares(batch, to_score=True)[0])
    (again,) = sent.shares(batch, to_score=True)
    held.forget()
    assert held.num_bytes == 0
    with pytest.raises(RLMegatronError, match="'input_ids' of rows 0, 1, 2, 3 of batch 1, 4 in all, which it was not"):
        held.micro_batches(again)


def test_the_next_steps_rows_replace_this_ones() -> None:
    packer, sent, held = Packer(dims=ParallelDims(), max_tokens=100, attention_cost=0.0), SentRows(1), RankRows()
    sizes = []
    for seed in range(3):
        samples = to_samples(rollouts([(4, [8, 8])], seed))
        held.micro_batches(sent.shares(packer.pack(samples), to_score=True)[0])
        sizes.append(held.num_bytes)
    assert sizes[0] == sizes[2] > 0


# Shares of sources: counts at every prefix for random weights, and exact resumes at random positions.
WEIGHTS = st.lists(st.floats(0.01, 1000) | st.integers(1, 1000).map(float), min_size=1, max_size=9)
STATE = TypeAdapter(MixtureState)


@given(weights=WEIGHTS, steps=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_within_one_of_its_share_by_the_rule_in_plain_words(weights: list[float], steps: int) -> None:
    shares = Proportions({f"s{i}": weight for i, weight in enumerate(weights)})
    total, taken = sum(map(Fraction, weights)), Counter[str]()
    for n in range(1, steps + 1):
        due = {
            f"s{i}": (taken[f"s{i}"] + 1) / Fraction(weight)
            for i, weight in enumerate(weights)
            if taken[f"s{i}"] < Fraction(weight) * n / total
        }
        taken[name := shares.next()] += 1
        assert name == min(due, key=due.__getitem__)
        for i, weight in enumerate(weights):
            assert abs(taken[f"s{i}"] - Fraction(weight) * n / total) < 1, (n, i)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.floats(0.1, 9)), min_size=1, max_size=4),
    before=st.integers(0, 60),
    after=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_the_order_after_a_resume_is_the_same(sizes: list[tuple[int, float]], before: int, after: int) -> None:
    prompts = [
        Prompt(id=f"s{i}/{row}", text="", token_ids=(0,), answer="", source=f"s{i}")
        for i, (size, _) in enumerate(sizes)
        for row in range(size)
    ]
    weights = {f"s{i}": weight for i, (_, weight) in enumerate(sizes)}
    whole = PromptStream(prompts, seed=3, weights=weights).next_prompts(before + after)
    first, second = (PromptStream(prompts, seed=3, weights=weights) for _ in range(2))
    first.next_prompts(before)
    second.restore(STATE.validate_json(STATE.dump_json(first.state())))  # type: ignore[arg-type]
    assert second.next_prompts(after) == whole[before:]
