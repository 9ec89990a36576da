"""A trajectory as one row or as a row a turn: the same losses and the same models after two epochs."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl_megatron.algorithms.aggregation import token_weight
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.data.samples import to_samples
from rl_megatron.errors import DataError
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.update import Update
from rl_megatron.types import Batch, LossInputs, ParallelDims, RolloutGroup, Samples
from tests.toy_roles import VOCABULARY, Toy, table
from tests.turns import branched, group, groups, trajectory

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"]
ROWS: dict[str, dict[str, Any]] = {
    **{name: {"aggregation": name} for name in AGGREGATIONS},
    "turns": {
        "credit": "turn", "gamma_turn": 0.5, "ratio_level": "turn", "aggregation": "seq_mean_token_mean",
        "clip_low": 0.02, "clip_high": 0.02,
    },
    "states": {
        "credit": "turn", "gamma_turn": 0.5, "turn_baseline": "state", "turn_compared": "returns", "turn_weight": 1.0,
    },
    "cut ones are left out": {"aggregation": "seq_mean_token_mean", "drop_truncated": True},
    "right ones again": {"aggregation": "prompt_mean", "nll_coefficient": 0.3},
    "KL in rewards": {
        "aggregation": "seq_mean_token_mean", "advantage_std": "none",
        "kl": {"coefficient": 0.3, "placement": "completion_reward"},
    },
}  # fmt: skip
STEPS = (1, 2)
ENVIRONMENT = {"function": "calculator", "template": "plain", "max_tokens": 40}


def config(algorithm: dict[str, Any], **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "algorithm": algorithm,
            **({"environment": ENVIRONMENT} if "turn" in algorithm.values() else {}),
            "train": {"minibatches": 2, "epochs": 2, "learning_rate": 1.0, **train},
            "rollout": {
                "engine": "vllm",
                "prompts_per_step": 4,
                "group_size": 4,
                "max_prompt_tokens": 2,
                "max_new_tokens": 40,
            },
            "learner": {"max_tokens_per_micro_batch": 90},
        }
    )


def apart(sampled: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Every second trajectory as a row for each of its turns."""
    return [
        replace(g, trajectories=tuple(branched(t) if n % 2 else t for n, t in enumerate(g.trajectories)))
        for g in sampled
    ]


def policy() -> Toy:
    return Toy(table(VOCABULARY, VOCABULARY, seed=1))


def made(c: RunConfig, toy: Toy) -> Update:
    unused = Toy(torch.zeros(1))
    reference = {"reference": Toy(table(VOCABULARY, VOCABULARY, seed=3))} if c.algorithm.needs_reference else {}
    roles: Any = Roles(learners={"policy": toy}, frozen=reference, engine=unused, weights=unused)
    return Update(config=c, roles=roles, attention_cost=0.0)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_trajectory_change_neither_loss_nor_model(name: str) -> None:
    one, other = policy(), policy()
    whole, rows = (made(config(ROWS[name]), each) for each in (one, other))
    for step in STEPS:
        sampled = groups(step)
        expected, found = (
            asyncio.run(update(some, step, Stopwatch())) for update, some in ((whole, sampled), (rows, apart(sampled)))
        )
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-5, atol=1e-6)
    assert not torch.equal(one.weights, policy().weights)


@functools.cache
def ragged() -> list[RolloutGroup]:
    """Two prompts: 2 and 3 trained tokens, of two turns; 1 trained token, and 4 in two rows."""
    return [
        group("a", [trajectory([2]), trajectory([1, 2])]),
        group("b", [trajectory([1]), branched(trajectory([3, 1]))]),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seq_mean_token_mean", [1 / 8] * 2 + [1 / 12] * 3 + [1 / 4] + [1 / 16] * 4),
        ("seq_mean_token_sum", [1 / 4] * 10),
        ("seq_mean_token_sum_norm", [1 / 40] * 10),
        ("prompt_mean", [1 / 10] * 5 + [1 / 10] * 5),
    ],
)
def test_weights_count_trajectories_and_prompts(name: str, expected: list[float]) -> None:
    samples = to_samples(ragged(), groups_of=True)
    weights = token_weight(samples, name, max_length=10)
    assert weights is not None
    assert weights[samples.mask].tolist() == pytest.approx(expected)
    assert not weights[~samples.mask].any()


def test_weights_of_a_part_count_what_is_in_it() -> None:
    """Sequences 0, 3 and 4: a part of each prompt."""
    samples, part = to_samples(ragged(), groups_of=True), torch.tensor([0, 3, 4])
    of_prompts = token_weight(samples, "prompt_mean", max_length=1, part=part)
    assert of_prompts is not None
    assert of_prompts[samples.mask].tolist() == pytest.approx([1 / 4] * 2 + [0] * 4 + [1 / 8] * 4)
    of_trajectories = token_weight(samples, "seq_mean_token_mean", max_length=1, part=part)
    assert of_trajectories is not None
    assert of_trajectories[samples.mask].tolist() == pytest.approx([1 / 4] * 2 + [0] * 4 + [1 / 8] * 4)


def test_no_weights_are_sent_where_the_counts_give_them() -> None:
    branches, single = to_samples(ragged()), to_samples([group("a", [trajectory([2])])])
    assert token_weight(branches, "token_mean", max_length=1) is None
    assert all(token_weight(single, name, max_length=1) is None for name in AGGREGATIONS[:-1])


def test_rows_of_a_trajectory_stay_in_one_minibatch_and_on_the_ranks_foreseen() -> None:
    samples = to_samples(apart(groups(2)))
    assert samples.trajectory_of is not None
    packer = Packer(dims=ParallelDims(dp=2), max_tokens=64, attention_cost=0.0)
    ranks, seen = packer.ranks(samples, most=3, seed=7), []
    for batch in packer.minibatches(samples, most=3, seeds=[7]):
        for d, row in enumerate(batch.sequences):
            assert ranks[torch.cat(row).numpy()].tolist() == [d] * sum(map(len, row))
        seen.append(torch.cat([torch.cat(row) for row in batch.sequences]))
    owners = [set(samples.trajectory_of[rows].tolist()) for rows in seen]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 9
    assert sorted(torch.cat(seen).tolist()) == list(range(samples.num_sequences))
    many = list(packer.minibatches(samples, most=99, seeds=[7]))
    assert len(many) == 9


def test_pairs_of_several_rows_are_refused() -> None:
    toy, unused = policy(), Toy(torch.zeros(1))
    roles: Any = Roles(learners={"policy": toy}, frozen={"reference": policy()}, engine=unused, weights=unused)
    c = config({"preference": {"beta": 0.1}, "old_logprobs": "rollout"})
    pair = [trajectory([2], total=1.0), branched(trajectory([1, 2], total=0.0))]
    with pytest.raises(DataError, match="pairs completions of one row"):
        asyncio.run(Update(config=c, roles=roles, attention_cost=0.0)([group("a", pair)], 1, Stopwatch()))


class Poisoned(Toy):
    """Its losses are given inf and NaN at every position outside the mask."""

    def _inputs(self, samples: Samples, batch: Batch, weights: torch.Tensor) -> LossInputs:
        inputs = super()._inputs(samples, batch, weights)
        junk = torch.from_numpy(np.resize([math.nan, math.inf, -math.inf], len(inputs.mask))).float()
        names = ("logprobs", "entropy", "advantages", "rollout_logprobs", "old_logprobs", "token_weight")
        columns: dict[str, Any] = {name: torch.where(inputs.mask, getattr(inputs, name), junk) for name in names}
        return replace(inputs, **columns)


def test_what_stands_in_context_changes_nothing() -> None:
    one, other = policy(), Poisoned(policy().weights)
    for toy in (one, other):
        asyncio.run(made(config(ROWS["turns"]), toy)(apart(groups(2)), 1, Stopwatch()))
    assert torch.equal(one.weights, other.weights)
    assert one.weights.isfinite().all()
