"""From rewards to the advantage of each token: every choice against numbers worked out by hand or in plain loops."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.packing import Packer, finish_minibatch
from rl_megatron.data.samples import single_turns, to_samples, tokens_after_prompt
from rl_megatron.errors import DataError
from rl_megatron.training.credit import (
    AlgorithmState,
    ShapedRewards,
    assign_credit,
    groups_with_gradient,
    mean_over_completions,
    reference_kl,
    shape_rewards,
    trainable_groups,
)
from rl_megatron.training.update import explained_variance, preference_pairs
from rl_megatron.types import FinishReason, ParallelDims, Prompt, RolloutGroup, Samples, TokenSequence, Trajectory
from tests.completions import branched, completion, groups, trajectory
from tests.completions import group as group_of

PROMPT = (1, 2)
NO_BASELINE = {"advantage_mean": "none", "advantage_std": "none"}


def group(name: str, rewards: list[float], lengths: list[int], finish: FinishReason = "stop") -> RolloutGroup:
    prompt = Prompt(id=name, text=name, token_ids=PROMPT, answer="")
    of = [completion(range(10, 10 + length), finish=finish) for length in lengths]
    return single_turns(prompt, of, [f"{name}{i}" for i in range(len(lengths))], rewards)


GROUPS = [group("a", [1.0, 0.0, 0.0], [3, 2, 4]), group("b", [1.0, 1.0], [1, 2])]


def credit(
    section: dict[str, object],
    groups: list[RolloutGroup] = GROUPS,
    *,
    max_new_tokens: int = 8,
    state: AlgorithmState | None = None,
    next_values: Tensor | None = None,
    **columns: Tensor,
) -> tuple[Samples, AlgorithmState]:
    algorithm = AlgorithmSection.model_validate(section)
    before = state or AlgorithmState()
    rewards = shape_rewards(groups, algorithm, before, max_new_tokens=max_new_tokens)
    samples = replace(to_samples(groups), **columns)
    return assign_credit(samples, groups, rewards, algorithm, success_reward=1.0, next_values=next_values)


def by_completion(samples: Samples, column: str = "advantages") -> list[list[float]]:
    """Of the trained tokens of each completion."""
    values, bounds = getattr(samples, column), samples.cu_seqlens.tolist()
    return [values[a:b][samples.mask[a:b]].tolist() for a, b in pairwise(bounds)]


def advantages(max_new_tokens: int = 8, groups: list[RolloutGroup] = GROUPS, **section: object) -> list[list[float]]:
    return by_completion(credit(section, groups, max_new_tokens=max_new_tokens)[0])


def test_group_baseline_gives_every_token_its_completions_advantage() -> None:
    std, found = statistics.stdev([1, 0, 0]), advantages()
    assert found[0] == pytest.approx([(2 / 3) / std] * 3, rel=1e-5)
    assert (found[1], found[3]) == (pytest.approx([(-1 / 3) / std] * 2, rel=1e-5), [0.0])
    assert found[4] == [0.0, 0.0]


def test_greedy_baseline_is_the_greedy_completions_reward_as_all_are_taken() -> None:
    """Judged by its length and its end, too."""
    wrong, cut = group("wrong", [0.25], [2]), group("cut", [1.0], [4], "length")
    groups = [replace(GROUPS[0], greedy=wrong), replace(GROUPS[1], greedy=cut)]
    remax: dict[str, object] = {"advantage_mean": "greedy", "advantage_std": "none"}
    assert advantages(groups=groups, **remax) == [[0.75] * 3, [-0.25] * 2, [-0.25] * 4, [0.0], [0.0] * 2]
    judged = advantages(4, groups, **remax, unfinished_reward=-2.0, overlong_buffer=2)
    assert judged == [[0.5 - 0.25] * 3, [-0.25] * 2, [-1.25] * 4, [1 + 3.0], [1 + 3.0] * 2]
    with pytest.raises(DataError, match="no greedy completion"):
        advantages(**remax)


def test_moving_baseline_is_the_mean_of_the_steps_before() -> None:
    section = {"advantage_mean": "moving", "advantage_std": "none", "baseline_decay": 0.5}
    first, state = credit(section)
    assert [a[0] for a in by_completion(first)] == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])
    assert state.baseline == pytest.approx(0.6)
    second, state = credit(section, [group("c", [0.0, 0.4], [1, 1])], state=state)
    assert [a[0] for a in by_completion(second)] == pytest.approx([-0.6, -0.2])
    assert state.baseline == pytest.approx(0.5 * 0.6 + 0.5 * 0.2)


@pytest.mark.parametrize("mean", ["none", "group", "batch"])
def test_no_other_mean_begins_a_moving_baseline(mean: str) -> None:
    _, state = credit({"advantage_mean": mean, "advantage_std": "none"})
    assert state.baseline is None


def test_whitening_is_over_the_tokens_of_the_whole_batch() -> None:
    found = advantages(**NO_BASELINE, whiten=True)
    tokens = [1.0] * 3 + [0.0] * 6 + [1.0] * 3
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    assert list(chain.from_iterable(found)) == pytest.approx([(t - mean) / std for t in tokens], rel=1e-5)


def test_truncated_completions_are_dropped_or_rescored_where_asked() -> None:
    cut = [group("a", [1.0, 0.5], [2, 2], "length"), group("b", [1.0, 0.0], [1, 1])]
    assert advantages(groups=cut, drop_truncated=True, **NO_BASELINE) == [[], [], [1.0], [0.0]]
    assert advantages(groups=cut, unfinished_reward=-2.0, **NO_BASELINE)[:2] == [[-2.0] * 2, [-2.0] * 2]


TWO = [group("a", [1.0], [3]), group("b", [0.5], [2], "length")]
VALUES = {"old_values": torch.tensor([9.0, 0.1, 0.2, 0.3, 9.0, 0.4, 0.5])}  # the first of each is at a prompt token
AFTER = torch.tensor([7.0, 0.6])  # the first completion ended by itself: its 7 must not be seen


def loop_gae(rewards: list[float], values: list[float], after: float, gamma: float, lam: float) -> list[float]:
    out, following, running = [], after, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        out.append(running)
    return out[::-1]


def test_a_cut_with_a_reward_of_its_own_is_an_end() -> None:
    section = {**NO_BASELINE, "credit": "gae", "gamma": 0.9, "lam": 0.8, "unfinished_reward": -1.0}
    samples, _ = credit(section, TWO, next_values=AFTER, **VALUES)
    assert by_completion(samples)[1] == pytest.approx(loop_gae([0, -1.0], [0.4, 0.5], 0.0, 0.9, 0.8), rel=1e-5)


def test_the_critic_may_learn_with_a_lambda_of_its_own_and_the_policys_may_follow_the_length() -> None:
    section = {**NO_BASELINE, "credit": "gae", "lam_length_factor": 0.5, "critic": {"lam": 1.0}}
    samples, _ = credit(section, TWO, next_values=AFTER, **VALUES)
    lam = [1 - 1 / (0.5 * 3), 0.0]
    wanted = [loop_gae([0, 0, 1], [0.1, 0.2, 0.3], 0.0, 1.0, lam[0]), loop_gae([0, 0.5], [0.4, 0.5], 0.6, 1.0, lam[1])]
    for found, expected in zip(by_completion(samples), wanted, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    returns = by_completion(samples, "returns")  # lambda 1: the rewards to go, and the bootstrap
    assert (returns[0], returns[1]) == (pytest.approx([1.0] * 3), pytest.approx([1.1] * 2))


REF = {"ref_logprobs": torch.tensor([0.0, -1.0, -0.5, -2.0, 0.0, -0.5, -1.5])}  # the engine's are -0.5


def test_kl_goes_into_the_reward_of_its_token() -> None:
    kl = {"coefficient": 0.2, "placement": "token_reward", "estimator": "k1"}
    found = by_completion(credit({**NO_BASELINE, "credit": "discounted", "kl": kl}, TWO, **REF)[0])
    tokens = [[-0.1, 0.0, -0.3 + 1.0], [0.0, -0.2 + 0.5]]
    assert found[0] == pytest.approx([sum(tokens[0]), sum(tokens[0][1:]), tokens[0][2]])
    assert found[1] == pytest.approx([sum(tokens[1]), tokens[1][1]])


def test_kl_goes_into_the_reward_of_its_completion() -> None:
    kl = {"coefficient": 0.2, "placement": "completion_reward", "estimator": "k1"}
    found = by_completion(credit({**NO_BASELINE, "kl": kl}, TWO, **REF)[0])
    assert found[0] == pytest.approx([1.0 - 0.2 * 2.0] * 3)
    assert found[1] == pytest.approx([0.5 - 0.2 * 1.0] * 2)


def test_the_kl_to_the_reference_is_the_mean_over_completions_of_their_tokens_mean() -> None:
    samples = replace(to_samples(TWO), **REF)
    kl = reference_kl(samples, AlgorithmSection.model_validate({"kl": {"estimator": "k1"}}))
    assert mean_over_completions(kl, samples) == pytest.approx((2.0 / 3 + 1.0 / 2) / 2)
    without = replace(samples, mask=samples.mask & (torch.arange(len(samples.mask)) < 4))  # the second is left out
    assert mean_over_completions(kl, without) == pytest.approx(2.0 / 3)
    one = replace(samples, mask=torch.arange(len(samples.mask)) == 3)
    assert mean_over_completions(kl, one) == pytest.approx(1.5)


def test_right_completions_tokens_share_the_nll_weight_of_a_minibatch() -> None:
    samples, _ = credit({"nll_coefficient": 0.1}, [group("a", [1.5, 0.0, 0.9], [3, 2, 4]), GROUPS[1]])
    (batch,) = Packer(dims=ParallelDims(), max_tokens=100, attention_cost=0.0).minibatches(samples, limit=1, seeds=[0])
    (whole,) = finish_minibatch(batch).micro_batches[0]
    each = pytest.approx(0.1 / 6)
    assert sorted(by_completion(whole, "nll_weights")) == [[0.0] * 2, [0.0] * 4, [each], [each] * 2, [each] * 3]


def test_a_cut_completion_that_counts_as_unfinished_is_not_imitated_as_right() -> None:
    cut = [group("a", [1.0, 0.0], [2, 2], "length"), group("b", [1.0, 0.0], [1, 1])]
    for section, of_cut in (({}, [0.1] * 2), ({"unfinished_reward": 0.0}, [0.0] * 2)):
        samples, _ = credit({"nll_coefficient": 0.1, **section}, cut)
        assert by_completion(samples, "nll_weights") == [pytest.approx(of_cut), [0.0] * 2, [pytest.approx(0.1)], [0.0]]


def pairs_of(groups: list[RolloutGroup], **section: object) -> tuple[Sequence[RolloutGroup], ShapedRewards]:
    algorithm = AlgorithmSection.model_validate({"preference": {"beta": 0.1}, **section})
    return preference_pairs(groups, shape_rewards(groups, algorithm, AlgorithmState(), max_new_tokens=4))


def test_pairs_are_of_the_rewards_that_the_algorithm_takes() -> None:
    """A cut completion that counts as wrong is nobody's better one, and a long one is worse than a short one."""
    cut, mixed = group("c", [1.0], [4], "length"), group("a", [1.0, 0.0], [4, 2])
    (long,), (_, right) = cut.trajectories, mixed.trajectories
    mixed = replace(mixed, trajectories=(long, right))
    assert len(pairs_of([mixed])[0]) == 1
    assert pairs_of([mixed], unfinished_reward=0.0)[0] == []
    (turned,), rewards = pairs_of([mixed], unfinished_reward=-1.0)
    assert [one.turns[0].finish_reason for one in turned.trajectories] == ["stop", "length"]
    assert (turned.rewards, rewards.values.tolist()) == ((0.0, 1.0), [0.0, -1.0])
    (both,), _ = pairs_of([group("b", [1.0, 1.0], [4, 2])], overlong_buffer=2)
    assert [one.num_sampled for one in both.trajectories] == [2, 4]


def test_groups_differ_by_the_rewards_that_the_algorithm_takes() -> None:
    cut, plain = group("c", [1.0, 0.0], [4, 4], "length"), group("a", [1.0, 0.0], [2, 2])
    equal, long = group("e", [1.0, 1.0], [2, 2]), group("l", [1.0, 1.0], [4, 2])
    groups = [cut, plain, equal, long]

    def differing(**section: object) -> list[bool]:
        return groups_with_gradient(groups, AlgorithmSection.model_validate(section), max_new_tokens=4)

    assert differing() == [True, True, False, False]
    assert differing(unfinished_reward=0.0) == [False, True, False, False]
    assert differing(overlong_buffer=2) == [True, True, False, True]


def test_dynamic_sampling_keeps_no_group_whose_rewards_differ_by_the_overlong_penalty_alone() -> None:
    """Nor one whose rewards the penalty makes equal, which has no advantages."""
    groups = [
        group("right", [1.0, 1.0, 1.0], [2, 3, 4]),
        group("wrong", [0.0, 0.0], [2, 4]),
        group("mixed", [1.0, 0.0], [4, 2]),
        group("levelled", [1.0, 0.5], [4, 2]),
    ]

    def kept(**section: object) -> list[bool]:
        row = AlgorithmSection.model_validate({"overlong_factor": 0.5, **section})
        return trainable_groups(groups, row, max_new_tokens=4)

    assert kept() == [False, False, True, True]
    assert kept(overlong_buffer=2) == [False, False, True, False]
    cut = [group("c", [1.0, 1.0], [4, 4], "length"), group("w", [0.0, 1.0], [4, 4], "length")]
    row = AlgorithmSection.model_validate({"unfinished_reward": 0.0, "overlong_buffer": 2})
    assert trainable_groups(cut, row, max_new_tokens=4) == [False, False]


def test_the_row_of_dapo_shapes_rewards_as_its_paper_does_and_draws_until_groups_differ() -> None:
    """Equation 13 with a fifth of the length as its cache, on its rewards of 1 and -1 and on ours of 1 and 0."""
    config = load_config("tiny_cpu", ["algorithm=dapo", "rollout.max_new_tokens=20"])
    right, lengths = [1.0, 0.0, 1.0, 1.0], [16, 17, 18, 20]
    of_equation = [0.0 if length <= 16 else (16 - length) / 4 for length in lengths]
    papers = [2 * one - 1 + penalty for one, penalty in zip(right, of_equation, strict=True)]
    groups = [group("a", right, lengths), group("e", [1.0, 1.0], [16, 3])]
    shaped = shape_rewards(groups, config.algorithm, AlgorithmState(), max_new_tokens=config.max_sampled).values
    assert (2 * shaped[:4] - 1).tolist() == pytest.approx(papers)
    samples, _ = credit(config.algorithm.model_dump(), groups, max_new_tokens=config.max_sampled)
    mean, std = statistics.fmean(papers), statistics.stdev(papers)
    assert [one[0] for one in by_completion(samples)[:4]] == pytest.approx([(r - mean) / std for r in papers], rel=1e-5)
    assert trainable_groups(groups, config.algorithm, max_new_tokens=config.max_sampled) == [True, False]
    assert config.rollout.dynamic_sampling == "refill"
    assert (
        load_config("tiny_cpu", ["rollout.dynamic_sampling=drop", "algorithm=dapo"]).rollout.dynamic_sampling == "drop"
    )


def test_explained_variance() -> None:
    samples = replace(to_samples(TWO), returns=torch.tensor([9.0, 1, 2, 3, 9, 4, 5]))
    exact = replace(samples, old_values=samples.returns)
    mean = replace(samples, old_values=torch.full((7,), 3.0))
    assert explained_variance(exact) == 1.0
    assert explained_variance(mean) == 0.0
    half = replace(samples, old_values=torch.tensor([0.0, 1, 2, 3, 0, 4, 1]))
    share = 1 - statistics.pvariance([0, 0, 0, 0, 4]) / 2.0
    assert explained_variance(half) == pytest.approx(share)
    small = replace(half, returns=half.returns / 10, old_values=half.old_values / 10)  # as of rewards from 0 to 1
    assert explained_variance(small) == pytest.approx(share)
    assert explained_variance(replace(small, returns=torch.full((7,), 0.1))) == 0.0


def test_unknown_combinations_are_refused_with_their_reasons() -> None:
    bad = {"advantage_mean": "greedy", "kl": {"coefficient": 0.1, "placement": "token_reward"}}
    with pytest.raises(ValueError, match=r"(?s)set advantage_std=none.*token_reward"):
        RunConfig.model_validate({"algorithm": bad})
    for credit in ("gae", "optimal"):
        with pytest.raises(ValueError, match=f"credit={credit} with .*: it has its own baseline"):
            RunConfig.model_validate({"algorithm": {"credit": credit}})
    optimal = {"credit": "optimal", "advantage_mean": "none", "advantage_std": "none"}
    with pytest.raises(ValueError, match=r"credit=optimal with algorithm\.correction.*: its baseline is optimal"):
        RunConfig.model_validate({"algorithm": {**optimal, "correction": {"mode": "truncate"}}})


# Credit over turns: a single turn is the group's advantage, several are those of plain loops.
PLAIN = {"advantage_mean": "none", "advantage_std": "none"}


def by_turn(sampled: list[RolloutGroup], **section: Any) -> list[list[float]]:
    """The advantage of each turn of each trajectory, which all of its tokens have; others have 0."""
    samples, _ = credit({"credit": "turn", **section}, sampled, max_new_tokens=99)
    assert not samples.advantages[~samples.mask].any()
    rows = [(row, one) for g in sampled for one in g.trajectories for row in one.chains]
    out: dict[int, list[float]] = {}
    for (row, one), (first, _) in zip(rows, pairwise(samples.cu_seqlens.tolist()), strict=True):
        for turn in row.turns:
            said = samples.advantages[first + turn.start - 1 : first + turn.stop - 1]
            assert bool((said == said[0]).all())
            out.setdefault(id(one), []).append(float(said[0]))
    return list(out.values())


def in_plain_loops(
    sampled: list[RolloutGroup], *, gamma: float, mean: str, std: str, baseline: str
) -> list[list[float]]:
    """A_k = Σ_{j≥k} gamma^(j-k) (r_j - mean)/std, of rewards whose last has what the others leave of the whole."""
    out = []
    for g in sampled:
        rewards = [[turn.reward or 0.0 for turn in one.turns[:-1]] for one in g.trajectories]
        rewards = [[*r, one.reward - sum(r)] for r, one in zip(rewards, g.trajectories, strict=True)]
        for r in rewards:
            above = []
            for k, value in enumerate(r):
                peers = [x for other in rewards for j, x in enumerate(other) if baseline == "all" or j == k]
                equal = len({round(x, 9) for x in peers}) == 1
                centered = value - (statistics.fmean(peers) if mean == "group" else 0.0)
                scale = 0.0 if equal else 1 / (statistics.stdev(peers) + 1e-6)
                above.append(centered * (scale if std == "group" else 1.0))
            out.append([sum(gamma ** (j - k) * above[j] for j in range(k, len(r))) for k in range(len(r))])
    return out


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"gamma_turn": 0.0},
        {"gamma_turn": 0.3, "turn_baseline": "index"},
        {"advantage_std": "none", "leave_one_out": True},
        {"advantage_mean": "batch", "advantage_std": "batch"},
        {"advantage_std": "none", "advantage_mean": "none", "whiten": True},
        {"overlong_buffer": 3, "unfinished_reward": -0.3},
    ],
    ids=str,
)
def test_a_single_turn_has_the_advantage_of_its_completion_to_the_bit(section: dict[str, Any]) -> None:
    alone = {k: v for k, v in section.items() if k not in ("gamma_turn", "turn_baseline")}
    assert advantages(4, credit="turn", **section) == advantages(4, **alone)
    one = [group_of("a", [trajectory([3], rewards=[r], finish=f) for r, f in ((0.1, "stop"), (0.7, "length"))])]  # type: ignore[arg-type]
    assert advantages(4, one, credit="turn", **section) == advantages(4, one, **alone)


@pytest.mark.parametrize("baseline", ["all", "index"])
@pytest.mark.parametrize(("mean", "std"), [("group", "group"), ("group", "none"), ("none", "none"), ("none", "group")])
@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_turns_are_those_of_plain_loops(gamma: float, mean: str, std: str, baseline: str) -> None:
    for seed in range(4):
        sampled = groups(seed)
        found = by_turn(sampled, gamma_turn=gamma, advantage_mean=mean, advantage_std=std, turn_baseline=baseline)
        wanted = in_plain_loops(sampled, gamma=gamma, mean=mean, std=std, baseline=baseline)
        for some, others in zip(found, wanted, strict=True):
            assert some == pytest.approx(others, rel=1e-5, abs=1e-6)


def test_shaping_acts_on_the_last_turn_and_the_sum_is_the_shaped_reward() -> None:
    cut = trajectory([2, 1, 3], rewards=[1.0, 0.5, 0.25], finish="length")
    assert by_turn([group_of("a", [cut])], gamma_turn=0.0, unfinished_reward=-1.0, **PLAIN) == [[1.0, 0.5, -2.5]]


def test_the_overlong_penalty_is_by_all_tokens_that_the_limit_counts() -> None:
    """Three turns of 8 and two observations of 3 tokens fill 30, in one row or in three, whose beginnings are alike."""
    row = AlgorithmSection(overlong_buffer=10, overlong_factor=0.5)
    whole, short = trajectory([8, 8, 8], total=1.0, finish="length"), trajectory([8, 8], total=1.0)
    sampled = [group_of("a", [whole, branched(whole), short])]
    assert shape_rewards(sampled, row, AlgorithmState(), max_new_tokens=30).values.tolist() == [0.5, 0.5, 1.0]
    other = replace(whole, chains=(*branched(whole).chains[:1], *trajectory([8], total=1.0, seed=5).chains))
    assert tokens_after_prompt(other) == 8 + 8  # of a second row with another first token, the prompt of 2 is known


def test_equal_rewards_of_turns_give_no_advantage() -> None:
    """0.1 three times and 0.1 twice are sums that float32 rounds apart."""
    alike = [trajectory([1, 2, 1], rewards=[0.1] * 3), trajectory([2, 2], rewards=[0.1] * 2)]
    assert by_turn([group_of("a", alike)]) == [[0.0] * 3, [0.0] * 2]


def test_groups_teach_if_two_of_their_compared_turns_differ() -> None:
    early, late = trajectory([1, 1], rewards=[1.0, 0.0]), trajectory([1, 1], rewards=[0.0, 1.0])
    sampled = [group_of("a", [early, late]), group_of("b", [early, early])]
    sampled.append(group_of("c", [trajectory([1, 1], rewards=[0.5] * 2)]))

    def teach(**section: object) -> list[bool]:
        return groups_with_gradient(sampled, AlgorithmSection.model_validate(section), max_new_tokens=9)

    assert teach() == [False, False, False]
    assert teach(credit="turn") == [True, True, False]
    assert teach(credit="turn", turn_baseline="index") == [True, False, False]


@pytest.mark.parametrize("name", ["discounted", "gae"])
def test_a_gap_between_turns_is_as_if_it_were_not_there(name: str) -> None:
    """Three turns in one row, and the same tokens as one turn behind the prompt, with equal values."""
    section = {"credit": name, "gamma": 0.9, **PLAIN, "whiten": True, "lam_length_factor": 0.5} | (
        {"lam": 0.8} if name == "gae" else {}
    )
    section = {k: v for k, v in section.items() if name == "gae" or k != "lam_length_factor"}
    section.pop("lam", None)
    whole = [trajectory([3, 2, 4], total=1.0), trajectory([1, 5, 1], total=0.25, finish="length", seed=3)]
    close = [closed(one) for one in whole]
    of_gaps, without = (to_samples([group_of("a", one)]) for one in (whole, close))
    values = torch.randn(int(without.mask.sum()), generator=torch.Generator().manual_seed(1))
    found = []
    for samples, trajectories in ((of_gaps, whole), (without, close)):
        old = torch.full((len(samples.mask),), math.nan)
        old[samples.mask] = values
        algorithm, sampled = AlgorithmSection.model_validate(section), [group_of("a", trajectories)]
        rewards = shape_rewards(sampled, algorithm, AlgorithmState(), max_new_tokens=99)
        made, _ = assign_credit(
            replace(samples, old_values=old),
            sampled,
            rewards,
            algorithm,
            success_reward=1.0,
            next_values=torch.tensor([0.3, -0.7]),
        )
        assert not made.advantages[~made.mask].any()
        found.append(made)
    assert of_gaps.mask.tolist() != without.mask.tolist()
    assert torch.equal(found[0].advantages[found[0].mask], found[1].advantages[found[1].mask])
    if name == "gae":
        assert torch.equal(found[0].returns[found[0].mask], found[1].returns[found[1].mask])


def closed(one: Trajectory) -> Trajectory:
    """The trajectory without the context between its turns: they are one."""
    (row,) = one.chains
    said = [token for turn in row.turns for token in row.token_ids[turn.start : turn.stop].tolist()]
    start = row.turns[0].start
    tokens = torch.tensor([*row.token_ids[:start].tolist(), *said], dtype=torch.int32).numpy()
    logprobs = torch.cat([torch.from_numpy(turn.logprobs.copy()) for turn in row.turns]).numpy()
    turn = replace(row.turns[-1], start=start, logprobs=logprobs)
    return replace(one, chains=(TokenSequence(token_ids=tokens, turns=(turn,)),))


@pytest.mark.parametrize("name", ["discounted", "gae"])
def test_credit_from_token_to_token_is_refused_where_a_trajectory_has_several_rows(name: str) -> None:
    sampled = [group_of("a", [branched(trajectory([2, 3], total=1.0)), trajectory([1], total=0.0)])]
    with pytest.raises(DataError, match=rf"algorithm\.credit={name} .* several rows.* Set credit=completion or turn"):
        credit({"credit": name, **PLAIN}, sampled, next_values=torch.zeros(3), old_values=torch.zeros(14))


@pytest.mark.parametrize("section", [{}, {"credit": "turn", "gamma_turn": 0.5}], ids=str)
def test_a_branched_trajectory_has_the_advantages_of_one_row(section: dict[str, object]) -> None:
    whole = groups(5)
    apart = [replace(g, trajectories=tuple(branched(one) for one in g.trajectories)) for g in whole]
    (one, _), (other, _) = (credit(section, sampled, max_new_tokens=99) for sampled in (whole, apart))
    assert other.num_sequences > one.num_sequences
    assert torch.equal(trained(one), trained(other))


@pytest.mark.parametrize("baseline", ["all", "index"])
def test_turns_follow_each_other_as_they_were_sampled_whatever_the_order_of_their_rows(baseline: str) -> None:
    rng, sampled, mixed, orders = random.Random(7), groups(5), list[RolloutGroup](), list[list[int]]()
    for g in sampled:
        apart = []
        for one in map(branched, g.trajectories):
            numbered = [replace(c, turns=(replace(c.turns[0], number=n),)) for n, c in enumerate(one.chains)]
            orders.append(rng.sample(range(len(numbered)), len(numbered)))
            apart.append(replace(one, chains=tuple(numbered[n] for n in orders[-1])))
        mixed.append(replace(g, trajectories=tuple(apart)))
    assert any(order != sorted(order) for order in orders)
    section = {"gamma_turn": 0.5, "turn_baseline": baseline}
    wanted, found = by_turn(sampled, **section), by_turn(mixed, **section)
    assert found == [[of[n] for n in order] for of, order in zip(wanted, orders, strict=True)]


def trained(samples: Samples) -> torch.Tensor:
    return samples.advantages[samples.mask]


def test_samples_of_single_turns_have_no_ids() -> None:
    samples = to_samples(GROUPS)
    assert samples.group_of is samples.trajectory_of is samples.turn_of is samples.token_weight is None
    assert set(samples.columns) == {
        "input_ids", "targets", "mask", "advantages", "rollout_logprobs", "old_logprobs",
    }  # fmt: skip


def test_ids_number_prompts_trajectories_and_turns() -> None:
    one, other = trajectory([2, 1]), trajectory([1])
    samples = to_samples([group_of("a", [branched(one), other]), group_of("b", [one])], groups_of=True, turns_of=True)
    assert samples.group_of.tolist() == [0, 0, 0, 1]
    assert samples.trajectory_of.tolist() == [0, 0, 1, 2]
    assert samples.turn_of[samples.mask].tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert not samples.turn_of[~samples.mask].any()
