"""BAPO (arXiv:2510.18927): limits by the loop of its algorithm 1, in an update, and what is refused beside them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.algorithms.objectives import balanced_limits
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.update import Update
from rl_megatron.types import Batch, Counts, Loss, Metric
from tests.rows import config_of
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.training.test_old_kl_limit import ENGINE
from tests.unit.training.test_update_oracle import CRITIC, groups

Token = tuple[float, float, float]  # log pi, log pi_old, A


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
    found = balanced_limits(*torch.tensor(tokens, dtype=torch.float64).unbind(1), row, share)
    wanted = of_algorithm(tokens, share, 0.6, 0.9, 1.2, 3.0, most)
    assert (1 - found.low, 1 + found.high, found.positive / found.all) == pytest.approx(wanted, abs=1e-9)


def test_seeds_of_the_test_above_end_at_the_start_between_and_at_the_end() -> None:
    ends = {
        of_algorithm(drawn(seed, 1.5), share, 0.6, 0.9, 1.2, 3.0)[:2]
        for seed in range(3)
        for share in (0.1, 0.4, 0.45, 0.95)
    }
    rounded = {(round(low, 2), round(high, 2)) for low, high in ends}
    assert {(0.6, 1.2), (0.9, 3.0)} < rounded


def test_the_last_step_reaches_the_end() -> None:
    """0.3 / 0.05 is 5.999999999999999 of floats."""
    row = config_of("bapo", "algorithm.balance.high=0.5").algorithm
    columns = torch.tensor(drawn(0, far=1.5), dtype=torch.float64).unbind(1)
    assert balanced_limits(*columns, row, share=0.95).high == pytest.approx(0.5)


def test_without_advantages_the_limits_stay() -> None:
    row = config_of("bapo").algorithm
    found = balanced_limits(torch.zeros(3), torch.ones(3), torch.zeros(3), row, 0.4)
    assert (found.low, found.high, found.all) == (0.4, 0.2, 0.0)


class Recording(Toy):
    """Keeps the row of each loss, and what the algorithm says of its minibatch by the weights before its step."""

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
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
    update = Update(
        config=config, roles=Roles(learners=learners, frozen={}, engine=unused, weights=unused), attention_cost=0.0
    )
    row = asyncio.run(update(groups(4, ENGINE), 4, Stopwatch()))
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
    assert 1 < row["steps/made"] == len(made) - 1
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
    assert "critic/learning_rate" in row
    assert not [name for name in row if name.startswith("balance/")]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            ["ratio_level=sequence"],
            r"balance\.share=0\.4 with algorithm\.ratio_level=sequence: it is of ratios of tokens",
        ),
        (["old_logprobs=interpolated"], r"balance\.share=0\.4 with algorithm\.old_logprobs=interpolated"),
        (
            ["old_logprobs=learner", "correction.mode=truncate"],
            r"balance\.share=0\.4 with algorithm\.correction: the share is of the loss without its weights",
        ),
        (
            ["clip_high=2.5"],
            r"balance\.low=0\.1 and high=2 with clip_low=0\.4 and clip_high=2\.5: .* to clip_high or more",
        ),
        (
            ["objective=cispo"],
            r"balance\.share=0\.4 does nothing: algorithm\.objective=cispo does not read it, .*clip does",
        ),
        (["balance.share=null", "balance.high=3"], r"balance\.high=3\.0 does nothing: algorithm\.balance\.share=null"),
        (
            ["preference.beta=0.1"],
            r"balance\.share=0\.4 does nothing: algorithm\.preference\.beta=0\.1 trains on pairs",
        ),
    ],
)
def test_what_has_no_such_share_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=bapo", *(f"algorithm.{key}" for key in keys)])
