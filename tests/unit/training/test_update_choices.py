"""Choices of an update: BAPO's limits, algorithm.old_kl_limit, tokens chosen by entropy or covariance, route flips."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.corrections import second_moment_mask
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.algorithms.objectives import balanced_limits
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.packing import Packer, finish_minibatch
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.features.router_study.step import engine_flips, update_flips
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.metrics import documented
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.optimizer_steps import learning_rate
from rl_megatron.training.scores import ScoredSamples
from rl_megatron.training.update import PolicyUpdate, covariances, random_in_range, token_choice, top_entropy, top_share
from rl_megatron.types import (
    Batch,
    Loss,
    LossOutput,
    Metric,
    ParallelDims,
    RolloutGroup,
    Samples,
    Scores,
    Trajectory,
    Want,
)
from tests.property.test_losses_metrics import batch
from tests.rows import config_of, policy_loss
from tests.samples import sequences_of
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.training.plain_update import PlainUpdate
from tests.unit.training.test_update_oracle import CRITIC, STEPS, groups

Token = tuple[float, float, float]  # log pi, log pi_old, A
ENDS = {"max_high": 2.0, "min_low": 0.1}  # algorithm.balance's defaults


def of_algorithm(
    tokens: Sequence[Token],
    share: float,
    a_low: float,
    b_low: float,
    a_high: float,
    b_high: float,
    most: float = math.inf,
) -> Any:
    """c_low, c_high and the share, by its steps of 0.02 and 0.05; each sum of its eq. 8 is one of absolute values, and
    a negative token's loss ``most`` times its |advantage|."""

    def contribution(c_low: float, c_high: float) -> float:
        positive = negative = 0.0
        for logp, old, advantage in tokens:
            ratio = math.exp(logp - old)
            if advantage > 0:
                positive += math.exp(old) * min(ratio * advantage, min(ratio, c_high) * advantage)
            else:
                loss = -min(ratio * advantage, min(max(ratio, c_low), c_high) * advantage)
                negative += math.exp(old) * min(loss, -most * advantage)
        return positive / (positive + negative)

    c_low, c_high = a_low, a_high
    while contribution(c_low, c_high) < share and c_low + 0.02 <= b_low + 1e-9:
        if c_high + 0.05 <= b_high + 1e-9:
            c_high += 0.05
        else:
            c_low += 0.02
    return c_low, c_high, contribution(c_low, c_high)


def drawn(seed: int, far: float) -> list[Token]:
    rng = random.Random(seed)
    old = [-rng.random() * 2 for _ in range(40)]
    return [(min(one + rng.gauss(0, far), 0.0), one, rng.gauss(0.1, 1)) for one in old]


@pytest.mark.parametrize("share", [0.1, 0.35, 0.4, 0.45, 0.5, 0.95])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most", [math.inf, 3.0])
def test_limits_are_those_of_the_papers_loop(seed: int, share: float, most: float) -> None:
    dual = "null" if most == math.inf else most
    row = config_of("bapo", f"algorithm.balance.share={share}", f"algorithm.dual_clip={dual}").algorithm
    tokens = drawn(seed, far=1.5)
    found = balanced_limits(*torch.tensor(tokens, dtype=torch.float64).unbind(1), row, share, **ENDS)
    wanted = of_algorithm(tokens, share, 0.6, 0.9, 1.2, 3.0, most)
    assert (1 - found.low, 1 + found.high, found.positive / found.all) == pytest.approx(wanted, abs=1e-9)


def test_seeds_of_the_test_above_end_at_the_start_between_and_at_the_end() -> None:
    shares = (0.1, 0.4, 0.45, 0.95)
    ends = {of_algorithm(drawn(seed, 1.5), share, 0.6, 0.9, 1.2, 3.0)[:2] for seed in range(3) for share in shares}
    assert {(0.6, 1.2), (0.9, 3.0)} < {(round(low, 2), round(high, 2)) for low, high in ends}


def test_the_last_step_reaches_the_end() -> None:
    """0.3 / 0.05 is 5.999999999999999 of floats."""
    row = config_of("bapo").algorithm
    columns = torch.tensor(drawn(0, far=1.5), dtype=torch.float64).unbind(1)
    assert balanced_limits(*columns, row, 0.95, max_high=0.5, min_low=0.1).high == pytest.approx(0.5)


def test_without_advantages_the_limits_stay() -> None:
    row = config_of("bapo").algorithm
    found = balanced_limits(torch.zeros(3), torch.ones(3), torch.zeros(3), row, 0.4, **ENDS)
    assert (found.low, found.high, found.all) == (0.4, 0.2, 0.0)


class Recording(Toy):
    """Keeps the row of each loss, and what the algorithm says of its minibatch by the weights before its step."""

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
        assert isinstance(loss, PolicyLoss)
        tokens = []
        for samples in (m for row in batch.micro_batches for m in row):
            logprobs = self.weights.double().log_softmax(-1)[samples.input_ids, samples.targets]
            columns = (logprobs, samples.old_logprobs, samples.advantages)
            tokens += list(zip(*(x[samples.mask].tolist() for x in columns), strict=True))
        self.heard.append(("row", loss.row, tokens))
        return await super().backward(batch, loss)


def updated(config: RunConfig) -> tuple[dict[str, Any], list[tuple[AlgorithmSection, list[Token]]], Recording]:
    policy = Recording(table(VOCABULARY, VOCABULARY, seed=1))
    unused: Any = Toy(torch.zeros(1))
    learners: Any = {
        "policy": policy,
        **({"critic": Toy(table(VOCABULARY, seed=2))} if config.algorithm.needs_critic else {}),
    }
    roles = RunComponents(learners=learners, frozen_models={}, engine=unused, weight_sync=unused)
    row = asyncio.run(PolicyUpdate(config=config, roles=roles, attention_cost=0.0)(groups(4, ENGINE), 4, Stopwatch()))
    heard: list[Any] = policy.heard
    return dict(row), [(call[1], call[2]) for call in heard if call[0] == "row"], policy


@pytest.mark.parametrize("old", ["rollout", "learner"])
@pytest.mark.parametrize("most_tokens", [16, 64])
def test_each_minibatch_has_the_limits_of_the_policy_before_its_step(old: str, most_tokens: int) -> None:
    """However it is cut into micro-batches; the first takes the pass that the step makes anyway."""
    balance = {"share": 0.6, "high": 0.5, "low": 0.04}
    config = RunConfig.model_validate(
        {
            "algorithm": {"balance": balance, "clip_low": 0.1, "clip_high": 0.1, "old_logprobs": old},
            "train": {"minibatches": 2, "epochs": 3, "learning_rate": 30.0},
            "rollout": {"max_prompt_tokens": 2, "max_new_tokens": 6},
            "learner": {"max_tokens_per_micro_batch": most_tokens},
        }
    )
    row, made, policy = updated(config)
    assert len(made) == 6
    wanted = [of_algorithm(tokens, 0.6, 0.9, 0.96, 1.1, 1.5) for _, tokens in made]
    found = [(1 - one.clip_low, 1 + one.clip_high) for one, _ in made]
    assert found == [pytest.approx(one[:2], abs=1e-6) for one in wanted]
    assert len(set(found)) >= 3  # start, end and between
    assert row["balance/clip_low"] == pytest.approx(sum(1 - low for low, _ in found) / 6)
    assert row["balance/clip_high"] == pytest.approx(sum(high - 1 for _, high in found) / 6)
    assert [call[0] for call in policy.heard if call[0] == "score"] == ["score"] * 6  # type: ignore[index]


def test_metrics_are_of_the_minibatches_that_were_trained_on() -> None:
    """The one at which the step ends has limits too, and trains nothing."""
    config = RunConfig.model_validate(
        {
            "algorithm": {"balance": {"share": 0.6, "high": 0.5}, "clip_low": 0.1, "old_kl_limit": 0.2},
            "train": {"minibatches": 2, "epochs": 3, "learning_rate": 30.0},
            "rollout": {"max_prompt_tokens": 2, "max_new_tokens": 6},
        }
    )
    row, made, _ = updated(config)
    assert 1 < row["steps/completed"] == len(made) - 1
    trained = [one.clip_high for one, _ in made[:-1]]
    assert made[-1][0].clip_high not in trained
    assert row["balance/clip_high"] == pytest.approx(sum(trained) / len(trained))
    sums = [worths(one, tokens) for one, tokens in made[:-1]]
    assert row["balance/positive_share"] == pytest.approx(sum(p for p, _ in sums) / sum(p + n for p, n in sums))


def worths(row: AlgorithmSection, tokens: Sequence[Token]) -> tuple[float, float]:
    """What positive and negative tokens sum to under a minibatch's limits."""
    parts = [(math.exp(old) * a, math.exp(logp - old)) for logp, old, a in tokens]
    positive = sum(worth * min(ratio, 1 + row.clip_high) for worth, ratio in parts if worth > 0)
    return positive, sum(-worth * max(ratio, 1 - row.clip_low) for worth, ratio in parts if worth < 0)


def test_a_step_of_the_critic_alone_has_no_limits() -> None:
    config = RunConfig.model_validate(
        {
            "algorithm": CRITIC | {"balance": {"share": 0.4}, "critic": {"only_steps": 4}},
            "rollout": {"max_prompt_tokens": 2, "max_new_tokens": 6},
        }
    )
    row, made, _ = updated(config)
    assert not made
    assert "critic/explained_variance" in row
    assert not [name for name in row if name.startswith("balance/")]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["ratio_level=sequence"], r"balance\.share=0\.4 with algorithm\.ratio_level=sequence: it balances ratios"),
        (["old_logprobs=interpolated"], r"balance\.share=0\.4 with algorithm\.old_logprobs=interpolated"),
        (
            ["old_logprobs=learner", "correction.mode=truncate"],
            r"balance\.share=0\.4 with algorithm\.correction\.mode=truncate: the share does not count",
        ),
        (["clip_high=2.5"], r"with algorithm\.balance\.high=2 and algorithm\.clip_high=2\.5: .* raise it"),
        (["objective=cispo"], r"balance\.share=0\.4 does nothing: with algorithm\.objective=cispo nothing is clipped"),
        (["balance.share=null", "balance.high=3"], r"balance\.high=3 does nothing: with algorithm\.balance\.share"),
        (["preference.beta=0.1"], r"balance\.share=0\.4 with algorithm\.preference\.beta=0\.1: pairs have no"),
    ],
)
def test_what_has_no_such_share_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=bapo", *(f"algorithm.{key}" for key in keys)])


# algorithm.old_kl_limit: a step makes no more optimizer steps of the policy once it is too far from the old one.
LIMIT = 0.002
ENGINE = table(VOCABULARY, VOCABULARY, seed=1) + 0.1 * table(VOCABULARY, VOCABULARY, seed=4)


def limited(algorithm: dict[str, Any], **train: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "algorithm": {"old_kl_limit": LIMIT, **algorithm},
            "train": {"minibatches": 1, "learning_rate": 2.0, **train},
            "rollout": {"max_prompt_tokens": 2, "max_new_tokens": 6},
            "learner": {"max_tokens_per_micro_batch": 16},
        }
    )


class Rig:
    """Tables of a policy and, where it is needed, a critic, and their update."""

    def __init__(self, config: RunConfig) -> None:
        self.policy, self.critic = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(table(VOCABULARY, seed=2))
        learners = {"policy": self.policy, **({"critic": self.critic} if config.algorithm.needs_critic else {})}
        unused = Toy(torch.zeros(1))
        self.roles: Any = RunComponents(learners=learners, frozen_models={}, engine=unused, weight_sync=unused)
        self.config = config
        self.update = PolicyUpdate(config=config, roles=self.roles, attention_cost=0.0)

    def step(self, number: int) -> Row:
        self.policy.heard.clear()
        self.critic.heard.clear()
        return asyncio.run(self.update(groups(number, ENGINE), number, Stopwatch()))

    def heard(self, of: Toy) -> list[str]:
        every: list[Any] = of.heard
        return [what for what, *_ in every if what in {"backward", "step", "drop"}]


@pytest.mark.parametrize("algorithm", [{}, CRITIC, {"old_logprobs": "rollout", "drop_truncated": True}])
@pytest.mark.parametrize("limit", [1e-6, LIMIT, 0.01, 9.0])
def test_epochs_end_where_those_of_plain_loops_do(algorithm: dict[str, Any], limit: float) -> None:
    """One minibatch an epoch, five epochs; a critic makes all of its steps."""
    config = limited({**algorithm, "old_kl_limit": limit}, epochs=5)
    rig = Rig(config)
    plain = PlainUpdate(config, rig.policy.weights, torch.zeros_like(rig.policy.weights), rig.critic.weights)
    for number in STEPS:
        row = rig.step(number)
        plain.step(groups(number, ENGINE), number)
        assert row["steps/completed"] == plain.steps_made
        expected = ["backward", "step"] * plain.steps_made + ["backward", "drop"] * (plain.steps_made < 5)
        assert rig.heard(rig.policy) == expected
        assert ("kl/stopped_at" in row) == (plain.steps_made < 5)
        torch.testing.assert_close(rig.policy.weights.double(), plain.policy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rig.critic.weights.double(), plain.critic, rtol=1e-4, atol=1e-5)


def test_limits_of_the_test_above_end_steps_at_different_epochs() -> None:
    made = [Rig(limited({"old_kl_limit": limit}, epochs=5)).step(4)["steps/completed"] for limit in (1e-6, LIMIT, 0.01)]
    assert made == [1, 2, 4]


def test_minibatches_behind_the_limit_are_left_out_and_the_rate_is_the_steps_own() -> None:
    """Of two epochs of three minibatches; each step begins afresh, in a process that knows nothing of before."""
    config = limited({}, minibatches=3, epochs=2, lr_decay="linear", steps=10)
    whole, again, made = Rig(config), Rig(config), []
    for number in (1, 2, 3):
        row = whole.step(number)
        count = row["steps/completed"]
        assert isinstance(count, int)
        made.append(count)
        assert whole.heard(whole.policy) == ["backward", "step"] * count + ["backward", "drop"] * (count < 6)
        rates = {one[1] for one in whole.policy.heard if isinstance(one, tuple) and one[0] == "step"}
        assert rates == {learning_rate(config, number)} == {row["learning_rate"]}
        assert row["learning_rate"] == pytest.approx(2.0 * (11 - number) / 10)
        if count < 6:
            assert float(str(row["kl/stopped_at"])) > LIMIT
        again.update = PolicyUpdate(config=config, roles=again.roles, attention_cost=0.0)
        assert {**again.step(number)} == row
        assert torch.equal(again.policy.weights, whole.policy.weights)
    assert 1 < min(made) < 6, made


def test_work_is_that_of_the_minibatches_that_were_computed() -> None:
    rig = Rig(limited({"old_kl_limit": 1e-6}, minibatches=4))
    rig.update.training_flops = lambda lengths: float(sum(lengths))
    row = rig.step(3)
    assert row["steps/completed"] == 1
    assert rig.heard(rig.policy) == ["backward", "step", "backward", "drop"]
    whole = Rig(limited({"old_kl_limit": 9.0}, minibatches=4)).step(3)
    assert row["flops/train"] == row["tokens/train"]
    assert float(str(row["tokens/train"])) < float(str(whole["tokens/train"]))


def test_a_batch_that_is_too_far_at_once_changes_nothing_and_says_so() -> None:
    """The old policy is the engine's, another one by far; the next batch may be near again."""
    rig = Rig(limited({"old_logprobs": "rollout", "old_kl_limit": 1e-4}, epochs=2))
    before, row = rig.policy.weights.clone(), rig.step(3)
    assert torch.equal(rig.policy.weights, before)
    assert (row["steps/completed"], row["steps/skipped"]) == (0, 0)
    assert rig.heard(rig.policy) == ["backward", "drop"]
    assert "loss" not in row


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=grpo", "train.minibatches=1"], r"old_kl_limit=0\.1 does nothing: with train\.epochs=1 and"),
        (["algorithm=dpo"], r"old_kl_limit=0\.1 does nothing: algorithm\.preference\.beta"),
        (
            ["algorithm=decoupled_ppo", "algorithm.old_logprobs=interpolated"],
            r"old_logprobs=interpolated does not read it; algorithm\.old_logprobs=learner or rollout does",
        ),
        (["algorithm=grpo", "algorithm.old_kl_limit=0"], r"old_kl_limit"),
    ],
)
def test_a_limit_that_cannot_act_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm.old_kl_limit=0.1", *keys])


# Tokens of a minibatch chosen by entropy or covariance: numpy, minibatches, ranks; the KL's value and gradient.
ONE_STEP = ["train.minibatches=1", "train.epochs=1"]
LENGTHS = [5, 9, 1, 3, 7, 4]


def samples_of(seed: int, lengths: list[int] = LENGTHS * 4) -> tuple[Samples, Tensor, Tensor]:
    """With log-probs and entropies of the policy; a quarter of the tokens is context."""
    g, num = torch.Generator().manual_seed(seed), sum(lengths)
    logprobs = -3 * torch.rand(num, generator=g)
    samples = sequences_of(
        lengths,
        input_ids=torch.arange(num),
        targets=torch.arange(num),
        mask=torch.rand(num, generator=g) < 0.75,
        advantages=torch.randn(num, generator=g),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
    )
    return samples, logprobs, 4 * torch.rand(num, generator=g)


def minibatches(row: AlgorithmSection, dp: int, most: int = 3) -> list[dict[int, tuple[float, float]]]:
    """Of each minibatch the advantage and the KL's weight of its trained tokens, by their ids."""
    samples, logprobs, entropy = samples_of(5)
    choice = token_choice(row, ScoredSamples(samples, {"logprobs": logprobs, "entropy": entropy}), seed=3)
    assert choice is not None
    packer = Packer(dims=ParallelDims(dp=dp), max_tokens=16, attention_cost=0.0)
    out = []
    for made in packer.minibatches(samples, limit=most, seeds=[1]):
        made, tokens = finish_minibatch(made, choice), {}
        for micro in (micro for row in made.micro_batches for micro in row):
            held = torch.zeros_like(micro.advantages) if micro.old_kl_weights is None else micro.old_kl_weights
            every = zip(micro.input_ids.tolist(), micro.advantages.tolist(), held.tolist(), micro.mask, strict=True)
            tokens |= {i: (a, w) for i, a, w, trained in every if trained}
        out.append(tokens)
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.01, 0.2, 0.55, 1.0])
def test_the_choices_are_those_of_numpy(share: float, seed: int) -> None:
    samples, logprobs, entropy = samples_of(seed)
    lp, a, h = (x.double().numpy() for x in (logprobs, samples.advantages, entropy))
    cov = (lp - lp.mean()) * (a - a.mean())
    np.testing.assert_allclose(covariances(logprobs, samples.advantages).numpy(), cov, rtol=1e-12)
    assert cov.mean() == pytest.approx(np.cov(lp, a, bias=True)[0, 1])
    num, kept = len(h), top_entropy(entropy, share).numpy()
    assert kept.sum() == np.ceil(share * num)
    assert h[kept].min() >= max(h[~kept], default=-1.0)
    held = top_share(torch.from_numpy(cov), share).numpy()
    assert held.sum() == max(int(share * num), 1)
    assert cov[held].min() >= max(cov[~held], default=-99.0)
    drawn = random_in_range(torch.from_numpy(cov), share, 0.1, 1.0, torch.Generator().manual_seed(seed)).numpy()
    inside = (cov >= 0.1) & (cov <= 1.0)
    assert drawn.sum() == min(max(int(share * num), 1), inside.sum())
    assert not (drawn & ~inside).any()


def test_equal_values() -> None:
    """Entropies of the threshold are all kept, as in the paper's equation; of equal covariances no more than the share
    are held, and of equal ratios, as of a group's first tokens, the first are trained on."""
    assert top_entropy(torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0]), 0.4).tolist() == [False, True, True, True, True]
    assert torch.where(top_share(torch.zeros(1000), 0.004))[0].tolist() == [0, 1, 2, 3]
    kept = second_moment_mask(torch.arange(60) % 2, threshold=0.25)
    assert torch.where(kept)[0].tolist() == [*range(20), *range(20, 60, 2)]


def test_of_fewer_tokens_than_the_share_needs_one_is_chosen() -> None:
    values = torch.tensor([0.0, 2.0, 1.0])
    drawn = random_in_range(values, 1e-3, 1.5, 9.0, torch.Generator())
    for chosen in (top_entropy(values, 1e-3), top_share(values, 1e-3), drawn):
        assert chosen.tolist() == [False, True, False]


def test_the_drawn_are_uniform_among_the_candidates() -> None:
    """1,000 draws of 5 of 20 candidates: each is drawn 250 times, give or take 5 standard deviations of 13.7."""
    values, generator = torch.arange(40.0), torch.Generator().manual_seed(0)
    counts = sum(random_in_range(values, 0.125, 10, 29, generator).long() for _ in range(1000))
    assert counts[:10].sum() == counts[30:].sum() == 0  # type: ignore[index,union-attr]
    assert ((counts[10:30] - 250).abs() < 69).all()  # type: ignore[index,operator]


@pytest.mark.parametrize(
    ("tokens", "parameters"),
    [
        ({"choose": "top_entropy", "share": 0.3}, {}),
        ({"choose": "clip_cov", "share": 0.1}, {"covariance_low": 0.1, "covariance_high": 3.0}),
        ({"choose": "kl_cov", "share": 0.1}, {"kl_cov": 0.7}),
    ],
)
def test_the_share_is_each_minibatchs_whatever_ranks(tokens: dict[str, object], parameters: dict[str, float]) -> None:
    """The same tokens over one, two and four data-parallel ranks, chosen among those of the minibatch alone."""
    samples, logprobs, entropy = samples_of(5)
    row = AlgorithmSection.model_validate({"tokens": tokens, "parameters": parameters})
    found = minibatches(row, dp=1)
    assert minibatches(row, dp=2) == minibatches(row, dp=4) == found
    assert len(found) == 3
    assert {i for each in found for i in each} == set(torch.where(samples.mask)[0].tolist())
    for each in found:
        ids = torch.tensor(sorted(each))
        given, kept = samples.advantages[ids], torch.tensor([each[i][0] for i in ids.tolist()])
        held = torch.tensor([each[i][1] for i in ids.tolist()])
        cov = covariances(logprobs[ids], given)
        if row.tokens.choose == "kl_cov":
            assert torch.equal(kept, given)
            assert torch.equal(held, 0.7 * top_share(cov, 0.1))
            continue
        assert not held.any()
        assert torch.equal(kept[kept != 0], given[kept != 0])
        if row.tokens.choose == "top_entropy":
            assert torch.equal(kept != 0, top_entropy(entropy[ids], 0.3))
        else:
            assert int((kept == 0).sum()) == int(0.1 * len(ids))
            assert ((cov[kept == 0] >= 0.1) & (cov[kept == 0] <= 3.0)).all()


def test_the_row_has_the_mean_share_and_a_minibatch_without_a_token_none() -> None:
    samples, logprobs, entropy = samples_of(5, [4, 4, 4])
    samples = replace(samples, mask=torch.tensor([True] * 8 + [False] * 4))
    measured = ScoredSamples(samples, {"logprobs": logprobs, "entropy": entropy})
    choice = token_choice(
        AlgorithmSection.model_validate({"tokens": {"choose": "top_entropy", "share": 0.5}}), measured, seed=0
    )
    assert choice(samples, np.array([2])) is samples
    for part in ([0], [0, 1]):
        choice(samples, np.array(part))
    assert choice.row() == {"tokens/chosen_fraction": 0.5}
    assert token_choice(AlgorithmSection(), measured, seed=0) is None


def test_the_kl_to_the_old_policy_is_the_papers_equation() -> None:
    """-rho A + beta KL on the held tokens: value and gradient by hand, in any split into micro-batches."""
    inputs = batch(LENGTHS, 3, scale=0.6, kept=0.75)
    held = 0.7 * (torch.arange(len(inputs.mask)) % 3 == 0)
    inputs = replace(inputs, old_kl_weights=torch.where(inputs.mask, held, torch.nan))
    loss = policy_loss(objective="importance", tokens={"choose": "kl_cov"})

    def evaluate(mask: Tensor) -> tuple[LossOutput, Tensor]:
        given = inputs.logprobs.detach().clone().requires_grad_()
        output = loss(replace(inputs, logprobs=given, mask=mask))
        return output, torch.autograd.grad(output.loss, given)[0]

    output, gradient = evaluate(inputs.mask)
    value, slopes, num = 0.0, np.zeros(len(held)), int(inputs.mask.sum())
    for t in torch.where(inputs.mask)[0].tolist():
        d = (inputs.logprobs[t] - inputs.old_logprobs[t]).item()
        kl, slope = abs(d), np.sign(d)
        value += (-np.exp(d) * float(inputs.advantages[t]) + float(held[t]) * kl) / num
        slopes[t] = (-np.exp(d) * float(inputs.advantages[t]) + float(held[t]) * slope) / num
    assert output.loss.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-10, atol=1e-15)
    halves = [evaluate(inputs.mask & side) for side in (inputs.segment_ids < 3, inputs.segment_ids >= 3)]
    assert sum(half.loss.item() for half, _ in halves) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(halves[0][1] + halves[1][1], gradient, rtol=1e-12, atol=0)


def test_k3_has_the_gradient_of_the_kl_of_the_old_policy() -> None:
    """Over all five outcomes, each weighted by the old policy: grad KL(old‖pi) = pi - old."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)
    logits = torch.randn(5, generator=g, dtype=torch.float64).requires_grad_()
    d = logits.log_softmax(0) - old
    (found,) = torch.autograd.grad((old.exp() * (d.exp() - 1 - d)).sum(), logits)
    torch.testing.assert_close(found, (logits.softmax(0) - old.exp()).detach())


def test_the_rows_have_the_shares_of_their_papers() -> None:
    rows = {n: load_config("tiny_cpu", [f"algorithm={n}"]) for n in ("clip_cov", "kl_cov", "top_entropy", "m2po")}
    tokens = {name: config.algorithm.tokens for name, config in rows.items()}
    assert {name: (t.choose, t.share) for name, t in tokens.items()} == {
        "clip_cov": ("clip_cov", 2e-4),
        "kl_cov": ("kl_cov", 2e-3),
        "top_entropy": ("top_entropy", 0.2),
        "m2po": ("second_moment", 0.2),
    }
    usual = rows["m2po"].algorithm.parameters
    assert (usual["second_moment"], rows["m2po"].algorithm.old_logprobs) == (0.04, "rollout")
    assert (usual["covariance_low"], usual["covariance_high"], usual["kl_cov"]) == (1.0, 5.0, 1.0)
    assert rows["top_entropy"].algorithm.clip_high == 0.28


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=grpo", "algorithm.tokens.share=0.5"], "tokens.share=0.5 does nothing.*tokens.choose=top_entropy"),
        (["algorithm=kl_cov", "algorithm.parameters.covariance_low=0.5"], "low=0.5 does nothing.*tokens.choose=clip_c"),
        (
            ["algorithm=clip_cov", "algorithm.tokens.low=9"],
            r"low=9 with algorithm\.parameters\.covariance_high=5: the lower limit is above the upper one; sw",
        ),
        (["algorithm=dpo", "algorithm.tokens.choose=kl_cov"], "trains on pairs and does not read it"),
        (["algorithm=m2po", "algorithm.tokens.share=0.5"], "tokens.share=0.5 does nothing"),
        (
            ["algorithm=m2po", "algorithm.second_moment_limit=0.1"],
            r"second_moment_limit.*algorithm\.parameters\.second_moment, with tokens\.choose=second_moment",
        ),
        (["algorithm=kl_cov", "algorithm.tokens.share=0"], r"tokens.share=0\b.* greater than 0"),
        (["algorithm=kl_cov", *ONE_STEP], r"tokens\.choose=kl_cov does nothing: with train\.epochs=1 and .*, where ab"),
    ],
)
def test_what_it_cannot_use_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)


@pytest.mark.parametrize(
    "keys",
    [
        [*ONE_STEP, "algorithm.old_logprobs=rollout"],
        ["train.minibatches=1", "train.epochs=2"],
        ["train.minibatches=2", "train.epochs=1"],
    ],
)
def test_kl_cov_is_taken_where_the_kl_has_a_gradient(keys: list[str]) -> None:
    load_config("tiny_cpu", ["algorithm=kl_cov", *keys])


def test_the_section_is_off_by_default() -> None:
    assert RunConfig().algorithm.tokens.choose == "all"


# Route flips: counted by hand on a stored batch, and by an update whose policy's routers change with its weights.
# Six positions of three layers, two experts a token. The second position is a prompt's and does not count.
BEFORE = [[[0, 1], [2, 3], [4, 5]]] * 6
AFTER = [
    [[1, 0], [3, 2], [5, 4]],  # the same experts in another order
    [[6, 7], [6, 7], [6, 7]],
    [[0, 1], [2, 7], [4, 5]],  # first flip in layer 1
    [[0, 1], [2, 7], [4, 6]],  # first flip in layer 1, and one above
    [[0, 1], [2, 3], [6, 7]],  # first flip in layer 2
    [[0, 1], [2, 3], [4, 5]],
]
MASK = [True, False, True, True, True, True]
RATIOS = [1.1, 9.0, 1.3, 0.9, 0.79, 1.21]  # outside of 0.8 to 1.2: the third, the fifth and the last


def test_flips_and_ratios_are_those_counted_by_hand() -> None:
    log_ratio = torch.tensor(RATIOS).log()
    row = update_flips(torch.tensor(BEFORE), torch.tensor(AFTER), log_ratio, torch.tensor(MASK))
    wanted = {"moe/flips_update": 4 / 15}
    wanted |= {"moe/first_flip/layer1": 2 / 5, "moe/first_flip/layer2": 1 / 5, "moe/first_flip/none": 2 / 5}
    outside = {"": 3 / 5, "/layer1": 1 / 2, "/layer2": 1.0, "/none": 1 / 2}
    assert row == pytest.approx(wanted | {f"ratio/outside{of}": share for of, share in outside.items()})
    found = engine_flips(torch.tensor(AFTER), torch.tensor(BEFORE), torch.tensor(MASK))
    assert found["moe/flips_engine"] == pytest.approx(4 / 15)
    assert all(documented(name) for name in [*row, *found])


def test_of_no_sampled_token_and_of_many_there_are_shares_or_none() -> None:
    nothing = torch.zeros(len(MASK), dtype=torch.bool)
    assert update_flips(torch.tensor(BEFORE), torch.tensor(AFTER), torch.zeros(len(MASK)), nothing) == {}
    before = torch.zeros(200_001, 1, 1, dtype=torch.uint8)
    after = before.clone()
    after[100_000:] = 1
    row = engine_flips(after, before, torch.ones(len(before), dtype=torch.bool))
    assert row["moe/flips_engine"] == pytest.approx(0.5, abs=1e-4)


@dataclass
class Routed(Toy):
    """A policy whose router takes expert 1 where the input token's first logit is above 0."""

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        found = await super().score(batch, want - {"routes"})
        if "routes" in want:
            found["routes"] = [[experts_of(self.weights, m.input_ids) for m in row] for row in batch.micro_batches]
        return found


def experts_of(weights: Tensor, tokens: Tensor) -> Tensor:
    return (weights[tokens, 0] > 0).to(torch.uint8).reshape(-1, 1, 1)


def updated_with_flips(replay: str) -> tuple[Row, Tensor, Tensor]:
    """The row of an update, and the policy's table before and after it."""
    policy, unused = Routed(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = RunComponents(learners={"policy": policy}, frozen_models={}, engine=unused, weight_sync=unused)
    config = RunConfig.model_validate(
        {"algorithm": {"routing_replay": replay}, "train": {"route_flips": True, "learning_rate": 40.0}}
    )
    before = policy.weights.clone()
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    row = asyncio.run(PolicyUpdate(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch()))
    return row, before, policy.weights


def test_an_update_compares_engine_old_and_new_policy() -> None:
    """The engine's routes in ``groups`` are 1 for odd tokens."""
    row, before, after = updated_with_flips("off")
    flips = engine = outside = total = 0
    for group in groups(3, table(VOCABULARY, VOCABULARY, seed=4)):
        for trajectory in group.trajectories:
            for x, y in pairwise(trajectory.chains[0].token_ids.tolist()[1:]):  # a prompt has two tokens
                old, new = bool(before[x, 0] > 0), bool(after[x, 0] > 0)
                ratio = math.exp(float(after[x].log_softmax(-1)[y] - before[x].log_softmax(-1)[y]))
                flips, engine, total = flips + (old != new), engine + (old != x % 2), total + 1
                outside += abs(ratio - 1) > 0.2
    assert 0 < flips < total
    assert row["moe/flips_update"] == pytest.approx(flips / total)
    assert row["moe/flips_engine"] == pytest.approx(engine / total)
    assert row["ratio/outside"] == pytest.approx(outside / total)


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_with_replay_no_route_flips_in_an_update(replay: str) -> None:
    row, _, _ = updated_with_flips(replay)
    assert (row["moe/flips_update"], row["moe/first_flip/none"]) == (0, 1)
    # With r3 the learner's pass takes the engine's experts: the share would be 0 however far the two are.
    assert (row["moe/flips_engine"] > 0) if replay == "r2" else ("moe/flips_engine" not in row)


def update_of(keys: dict[str, Any]) -> PolicyUpdate:
    unused = Toy(torch.zeros(1))
    roles: Any = RunComponents(learners={"policy": unused}, frozen_models={}, engine=unused, weight_sync=unused)
    return PolicyUpdate(config=RunConfig.model_validate(keys), roles=roles, attention_cost=0.0)


def with_routes(*numbers: int) -> list[RolloutGroup]:
    """Four groups of four completions, of which those of these numbers have routes."""
    return [
        one if number in numbers else replace(one, trajectories=tuple(map(stripped, one.trajectories)))
        for number, one in enumerate(groups(3, table(VOCABULARY, VOCABULARY, seed=4)))
    ]


def stripped(one: Trajectory) -> Trajectory:
    return replace(one, chains=tuple(replace(row, columns={}) for row in one.chains))


@pytest.mark.parametrize(("routed", "bare"), [((), 16), ((1, 3), 8), ((0, 1, 2), 4)])
def test_completions_without_routes_are_refused_by_the_key_that_needs_them(routed: tuple[int, ...], bare: int) -> None:
    said = rf"train\.route_flips=true, but {bare} of the step's 16 completions have no routes"
    with pytest.raises(DataError, match=said):
        asyncio.run(update_of({"train": {"route_flips": True}})(with_routes(*routed), 3, Stopwatch()))


@pytest.mark.parametrize("routed", [(), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_routes_that_the_run_does_not_ask_for_any_more_are_left_out(routed: tuple[int, ...]) -> None:
    assert update_of({})._build_samples(with_routes(*routed)).extra == {}
