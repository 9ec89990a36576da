"""Rewards of a completion's steps: DeepSeekMath's process supervision (arXiv:2402.03300, 4.1.3) in plain loops."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.samples import to_samples
from rl_megatron.data.trajectories import ends_in_tokens, in_steps, single_turns
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.threads import scored
from rl_megatron.training.credit.assign import assign_credit
from rl_megatron.training.credit.shaping import shape_rewards
from rl_megatron.training.credit.state import AlgorithmState
from rl_megatron.training.group_job import carried_row
from rl_megatron.types import Completion, Prompt, RolloutGroup, Samples, Scored, Span
from tests.documents import blocks

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"
WORDS = ["a", "bc", " def", "", ".\n", "\n\n", " g", "h.", " \n", " i"]
PROMPT = Prompt(id="p", text="", token_ids=(7, 7, 7), answer="")
Steps = list[tuple[int, float]]


def decode(tokens: Sequence[int]) -> str:
    """Drops the space that a text begins with, as SentencePiece's decoders do; word 3 is a special token."""
    return "".join(WORDS[token] for token in tokens).removeprefix(" ")


def completion(tokens: Sequence[int], *spans: tuple[int, int]) -> Completion:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    found = tuple(Span(*span) for span in spans or ((0, 1),))
    return Completion(token_ids=np.array(tokens, np.int32), logprobs=logprobs, finish_reason="stop", spans=found)


def judged(tokens: Sequence[Sequence[int]], steps: Sequence[Steps]) -> RolloutGroup:
    """A group whose completions have these tokens and steps."""
    texts = [decode(one) for one in tokens]
    said = scored(steps, texts, steps=True)
    whole = single_turns(PROMPT, [completion(one) for one in tokens], texts, [one.total for one in said])
    return in_steps(whole, said, decode)


def drawn(seed: int) -> tuple[list[list[int]], list[Steps]]:
    """Four completions of up to 20 tokens with up to 5 steps each, at any characters."""
    rng = random.Random(seed)
    tokens = [[0, *(rng.randrange(len(WORDS)) for _ in range(rng.randrange(20)))] for _ in range(4)]
    steps = []
    for one in tokens:
        length = len(decode(one))
        ends = sorted(rng.sample(range(1, length + 1), min(rng.randrange(1, 6), length)))
        steps.append([(end, rng.choice([-1.0, 0.0, 0.3, 1.0])) for end in ends])
    return tokens, steps


def first_with(tokens: Sequence[int], end: int) -> int:
    return next(count for count in range(1, len(tokens) + 1) if len(decode(tokens[:count])) >= end)


def in_plain_loops(tokens: Sequence[Sequence[int]], steps: Sequence[Steps]) -> list[list[float]]:
    """Every token's sum of the normalised rewards of the steps that end at it or behind it."""
    placed = []
    for one, its in zip(tokens, steps, strict=True):
        by_end: dict[int, float] = {}
        for end, reward in its:
            at = first_with(one, end)
            by_end[at] = by_end.get(at, 0.0) + reward
        last = max(by_end)
        by_end[len(one)] = by_end.pop(last)
        placed.append(by_end)
    rewards = [reward for by_end in placed for reward in by_end.values()]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    out = []
    for one, by_end in zip(tokens, placed, strict=True):
        normal = {end: (reward - mean) / (std + 1e-6) if std > 1e-9 else 0.0 for end, reward in by_end.items()}
        out.append([sum(value for end, value in normal.items() if end > t) for t in range(len(one))])
    return out


def credited(groups: Sequence[RolloutGroup], *keys: str) -> Samples:
    section = load_config("tiny_cpu", ["algorithm=grpo_process", *keys]).algorithm
    rewards = shape_rewards(groups, section, AlgorithmState(), max_new_tokens=99)
    return assign_credit(to_samples(groups), groups, rewards, section, success_reward=1.0)[0]


@pytest.mark.parametrize("seed", range(12))
def test_advantages_are_the_sums_of_later_steps_normalised_rewards(seed: int) -> None:
    """Two groups in a batch: a step is compared with those of its own."""
    both = [drawn(seed), drawn(seed + 100)]
    samples = credited([judged(*one) for one in both])
    wanted = [value for one in both for of in in_plain_loops(*one) for value in of]
    assert samples.advantages[samples.mask].tolist() == pytest.approx(wanted, abs=1e-5)
    assert not samples.advantages[~samples.mask].any()


def test_steps_of_the_paper_by_hand() -> None:
    """Rewards 1, 0 of one completion and 0.5 of the other: mean 0.5, std 0.5."""
    group = judged([[0, 1, 6], [0, 1]], [[(3, 1.0), (5, 0.0)], [(3, 0.5)]])
    samples = credited([group])
    assert samples.advantages[samples.mask].tolist() == pytest.approx([0, 0, -1, 0, 0], abs=1e-5)
    assert group.rewards == (1.0, 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_ends_are_those_of_decoding_every_prefix(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [0, *(rng.randrange(len(WORDS)) for _ in range(300))]
    ends = sorted(rng.sample(range(1, len(decode(tokens)) + 1), 25))
    assert ends_in_tokens(tokens, ends, decode) == [first_with(tokens, end) for end in ends]


def test_a_completion_in_steps_has_the_tokens_of_the_whole_and_the_versions_that_sampled_them() -> None:
    tokens, text = [0, 1, 2, 4, 6, 6], decode([0, 1, 2, 4, 6, 6])
    said = scored([[(3, 1.0), (8, 2.0), (10, 4.0)]], [text], steps=True)
    whole = single_turns(PROMPT, [completion(tokens, (0, 5), (1, 6), (4, 7))], [text], [7.0])
    ((one,), (before,)) = in_steps(whole, said, decode).trajectories, whole.trajectories
    ((row,), (old,)) = one.chains, before.chains
    assert row.token_ids.tolist() == old.token_ids.tolist()
    assert [turn.start for turn in row.turns] == [3, 5, 7]
    assert np.concatenate([turn.logprobs for turn in row.turns]).tolist() == old.turns[0].logprobs.tolist()
    assert "".join(turn.text for turn in row.turns) == text
    assert [turn.spans for turn in row.turns] == [(Span(0, 5), Span(1, 6)), (Span(0, 6),), (Span(0, 7),)]
    assert [turn.reward for turn in row.turns] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_pushes_met_are_those_of_the_completion_however_many_steps_it_has(seed: int) -> None:
    tokens, steps = drawn(seed)
    rng = random.Random(seed)
    versions = [sorted(rng.choices(range(4), k=len(one))) for one in tokens]  # of each token
    met = [[n for n in range(1, len(of)) if of[n] != of[n - 1]] for of in versions]
    spans = [[(n, of[n]) for n in (0, *places)] for of, places in zip(versions, met, strict=True)]
    texts = [decode(one) for one in tokens]
    said = scored(steps, texts, steps=True)
    made = [completion(one, *its) for one, its in zip(tokens, spans, strict=True)]
    cut = in_steps(single_turns(PROMPT, made, texts, [one.total for one in said]), said, decode)
    row = carried_row(cut.trajectories, RolloutSection())
    assert row["in_flight/resumed_tokens"] == sum(places[-1] for places in met if places)
    assert row["in_flight/recomputed_tokens"] == sum(map(sum, met))


def test_a_turn_that_begins_where_another_ends_is_a_request_of_its_own() -> None:
    (one,) = single_turns(PROMPT, [completion([0, 1, 2], (0, 5), (2, 6))]).trajectories
    (chain,), (turn,) = one.chains, one.turns
    two = replace(chain, turns=(turn, replace(turn, start=turn.stop, number=1)))
    row = carried_row([replace(one, chains=(two,))], RolloutSection())
    assert row == {"in_flight/resumed_tokens": 2 + 2, "in_flight/recomputed_tokens": 2 + 2}


def test_ends_within_one_token_are_one_step_and_a_number_is_none() -> None:
    """Token 2 has four characters; a completion whose reward failed is not cut."""
    tokens = [0, 2, 1]
    group = judged([tokens], [[(2, 1.0), (4, 2.0), (6, 4.0)]])
    assert [(turn.start, turn.reward) for turn in group.trajectories[0].turns] == [(3, 3.0), (5, 4.0)]
    text = decode(tokens)
    for plain in (Scored(total=1.0), Scored(total=2.0, steps=((1, float("nan")),), error="not finite")):
        whole = single_turns(PROMPT, [completion(tokens)], [text], [plain.total])
        assert in_steps(whole, [plain], decode).trajectories == whole.trajectories


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([[]], r"end at \[\]; there must be one at least"),
        ([[(2, 1.0), (2, 1.0)]], r"end at \[2, 2\]; .* must ascend, from 1 to the 3 characters"),
        ([[(0, 1.0)]], "must ascend, from 1"),
        ([[(4, 1.0)]], "from 1 to the 3 characters of its text"),
        ([[1.0, 2.0]], r"returned a float as a step of completion 0; it must be \(end, reward\)"),
        ([[(1.5, 2.0)]], r"must be \(end, reward\)"),
        ([None], "returned None for completion 0; .*, or a list of its steps"),
        ([1.0, [(1, 1.0)]], "steps of completion 1"),
    ],
)
def test_steps_that_cannot_be_placed_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        scored(given, ["abc"], steps=True)


def test_steps_without_the_key_are_refused() -> None:
    with pytest.raises(RewardError, match=r"returned a list for completion 0.*Steps are read with reward.steps=true"):
        scored([[(1, 1.0)]], ["abc"])
    assert scored([1, [(1, 0.5), (np.int64(3), 0.25)]], ["abc", "abc"], steps=True)[1].total == 0.75


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            ["algorithm=grpo", "reward.steps=true"],
            "reward.steps=true does nothing: algorithm.credit=completion compares",
        ),
        (["algorithm=gspo_token", "reward.steps=true"], "reward.steps=true does nothing: algorithm.credit=discounted"),
        (["algorithm=grpo", "algorithm.credit=turn"], "without environment.function, and without reward.steps=true"),
        (["algorithm=grpo_process", "reward.parts.format=1.0"], "reward.parts .*: a sum of parts has no steps"),
        (["algorithm=grpo_process", "rollout.interrupt.earliest=0.1"], "reward.steps=true with rollout.interrupt"),
    ],
)
def test_what_reads_no_steps_or_has_none_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)


def test_the_reward_of_the_page_gives_steps_that_are_placed() -> None:
    (documented,) = blocks(PAGE, "python")
    found: dict[str, Any] = {}
    exec(documented.text, found)
    prompt = Prompt(id="p", text="", token_ids=(1,), answer="12")
    texts = ["5+5=10\n10+2=12", "5+5=11\n11+1=12\n12", "no sum"]
    said = scored(found["sums"](prompt, [], texts), texts, steps=True)
    assert [one.steps for one in said] == [((7, 1.0), (14, 2.0)), ((7, 0.0), (15, 1.0), (17, 1.0)), ((6, 0.0),)]
