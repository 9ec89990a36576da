"""From rewards to the advantage of each token: every choice against numbers worked out by hand or in plain loops."""

from __future__ import annotations

import statistics
from itertools import chain, pairwise

import pytest
import torch

from rl_megatron.config import AlgorithmSection
from rl_megatron.credit import limit_second_moment, make_samples, masked_in
from rl_megatron.types import Batch, Completion, FinishReason, Prompt, RolloutGroup

PROMPT = (1, 2)


def completion(length: int, finish: FinishReason = "stop") -> Completion:
    return Completion(
        token_ids=tuple(range(10, 10 + length)), logprobs=(-0.5,) * length, finish_reason=finish, versions=(0, 0)
    )


def group(name: str, rewards: list[float], lengths: list[int], finish: FinishReason = "stop") -> RolloutGroup:
    return RolloutGroup(
        prompt=Prompt(id=name, text=name, token_ids=PROMPT, answer=""),
        completions=tuple(completion(n, finish) for n in lengths),
        texts=("",) * len(lengths),
        rewards=tuple(rewards),
        greedy_reward=0.25,
    )


GROUPS = [group("a", [1.0, 0.0, 0.0], [3, 2, 4]), group("b", [1.0, 1.0], [1, 2])]


def advantages(max_new_tokens: int = 8, groups: list[RolloutGroup] = GROUPS, **section: object) -> list[list[float]]:
    """Advantages of the trained tokens of each completion."""
    samples = make_samples(groups, AlgorithmSection.model_validate(section), max_new_tokens=max_new_tokens)
    bounds = samples.cu_seqlens.tolist()
    return [samples.advantages[a:b][samples.mask[a:b]].tolist() for a, b in pairwise(bounds)]


def test_group_baseline_gives_every_token_its_completions_advantage() -> None:
    std = statistics.stdev([1, 0, 0])
    found = advantages()
    assert found[0] == pytest.approx([(2 / 3) / std] * 3, rel=1e-5)
    assert found[1] == pytest.approx([(-1 / 3) / std] * 2, rel=1e-5)
    assert found[3] == [0.0]
    assert found[4] == [0.0, 0.0]


def test_greedy_baseline_is_the_greedy_completions_reward() -> None:
    found = advantages(advantage_mean="greedy", advantage_std="none")
    assert found == [[0.75] * 3, [-0.25] * 2, [-0.25] * 4, [0.75], [0.75] * 2]


def test_discounted_credit_falls_towards_the_start() -> None:
    found = advantages(advantage_mean="none", advantage_std="none", credit="discounted", gamma=0.5)
    assert found == [[0.25, 0.5, 1.0], [0.0] * 2, [0.0] * 4, [1.0], [0.5, 1.0]]


def test_whitening_is_over_the_tokens_of_the_whole_batch() -> None:
    found = advantages(advantage_mean="none", advantage_std="none", whiten=True)
    tokens = [1.0] * 3 + [0.0] * 6 + [1.0] * 3
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    assert list(chain.from_iterable(found)) == pytest.approx([(t - mean) / std for t in tokens], rel=1e-5)


def test_overlong_completions_are_penalised_before_the_baseline() -> None:
    plain = {"advantage_mean": "none", "advantage_std": "none", "overlong_buffer": 2}
    found = advantages(max_new_tokens=4, **plain)
    assert [tokens[0] for tokens in found] == pytest.approx([1 - 0.5, 0.0, -1.0, 1.0, 1.0])


def test_truncated_completions_are_dropped_or_rescored_where_asked() -> None:
    cut = [group("a", [1.0, 0.5], [2, 2], "length"), group("b", [1.0, 0.0], [1, 1])]
    none = {"advantage_mean": "none", "advantage_std": "none"}
    assert advantages(groups=cut, drop_truncated=True, **none) == [[], [], [1.0], [0.0]]
    assert advantages(groups=cut, unfinished_reward=-2.0, **none)[:2] == [[-2.0] * 2, [-2.0] * 2]


def test_the_second_moment_is_limited_over_all_minibatches_together() -> None:
    section = AlgorithmSection(advantage_mean="none", advantage_std="none")
    parts = [make_samples([g], section, max_new_tokens=8) for g in GROUPS]
    batches = [Batch(micro_batches=((p,),), num_tokens=9, num_sequences=3) for p in parts]
    drift = [torch.zeros(len(p.mask)) for p in parts]
    drift[1][parts[1].mask] = torch.tensor([0.8, 0.1, 0.0])  # one token far off, in the second minibatch
    current = [
        Batch(micro_batches=((p.with_old_logprobs(p.rollout_logprobs + d),),), num_tokens=9, num_sequences=3)
        for p, d in zip(parts, drift, strict=True)
    ]
    limited = limit_second_moment(batches, current, 0.04)
    assert masked_in(current) == 12
    assert masked_in(limited) == 11
    (kept,) = limited[1].micro_batches[0]
    assert kept.mask[parts[1].mask].tolist() == [False, True, True]
    assert torch.equal(kept.old_logprobs, parts[1].old_logprobs)
