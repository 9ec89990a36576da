"""Route flips: counted by hand on a stored batch, and by an update whose policy's routers change with its weights."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import DataError
from rl_megatron.interfaces import Roles
from rl_megatron.observability.metrics.table import documented
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.scores.flips import engine_flips, update_flips
from rl_megatron.training.update import Update
from rl_megatron.types import Batch, RolloutGroup, Scores, Trajectory, Want
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.training.test_update_oracle import groups

# Six positions of three layers, two experts a token. The second position is a prompt's and does not count.
BEFORE = [
    [[0, 1], [2, 3], [4, 5]],
    [[0, 1], [2, 3], [4, 5]],
    [[0, 1], [2, 3], [4, 5]],
    [[0, 1], [2, 3], [4, 5]],
    [[0, 1], [2, 3], [4, 5]],
    [[0, 1], [2, 3], [4, 5]],
]
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
    assert row == pytest.approx(
        {
            "moe/flips_update": 4 / 15,
            "moe/flips_update/layer0": 0.0,
            "moe/flips_update/layer1": 2 / 5,
            "moe/flips_update/layer2": 2 / 5,
            "moe/first_flip/layer1": 2 / 5,
            "moe/first_flip/layer2": 1 / 5,
            "moe/first_flip/none": 2 / 5,
            "ratio/outside": 3 / 5,
            "ratio/outside/layer1": 1 / 2,
            "ratio/outside/layer2": 1.0,
            "ratio/outside/none": 1 / 2,
        }
    )
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
            chosen = [[experts_of(self.weights, m.input_ids) for m in row] for row in batch.micro_batches]
            found["routes"] = chosen
        return found


def experts_of(weights: Tensor, tokens: Tensor) -> Tensor:
    return (weights[tokens, 0] > 0).to(torch.uint8).reshape(-1, 1, 1)


def updated(replay: str) -> tuple[Row, Tensor, Tensor]:
    """The row of an update, and the policy's table before and after it."""
    policy, unused = Routed(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = Roles(learners={"policy": policy}, frozen={}, engine=unused, weights=unused)
    config = RunConfig.model_validate(
        {"algorithm": {"routing_replay": replay}, "train": {"route_flips": True, "learning_rate": 40.0}}
    )
    before = policy.weights.clone()
    sampled = groups(3, table(VOCABULARY, VOCABULARY, seed=4))
    return (
        asyncio.run(Update(config=config, roles=roles, attention_cost=0.0)(sampled, 3, Stopwatch())),
        before,
        policy.weights,
    )


def test_an_update_compares_engine_old_and_new_policy() -> None:
    """The engine's routes in ``groups`` are 1 for odd tokens."""
    row, before, after = updated("off")
    flips = engine = outside = total = 0
    for group in groups(3, table(VOCABULARY, VOCABULARY, seed=4)):
        for trajectory in group.trajectories:
            tokens = trajectory.chains[0].token_ids.tolist()
            for x, y in pairwise(tokens[1:]):  # a prompt has two tokens
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
    row, _, _ = updated(replay)
    assert row["moe/flips_update"] == 0
    assert row["moe/first_flip/none"] == 1
    # With r3 the learner's pass takes the engine's experts: the share would be 0 however far the two are.
    assert (row["moe/flips_engine"] > 0) if replay == "r2" else ("moe/flips_engine" not in row)


def update_of(keys: dict[str, Any]) -> Update:
    unused = Toy(torch.zeros(1))
    roles: Any = Roles(learners={"policy": unused}, frozen={}, engine=unused, weights=unused)
    return Update(config=RunConfig.model_validate(keys), roles=roles, attention_cost=0.0)


def with_routes(*numbers: int) -> list[RolloutGroup]:
    """Four groups of four completions, of which those of these numbers have routes."""
    return [
        one if number in numbers else replace(one, trajectories=tuple(map(stripped, one.trajectories)))
        for number, one in enumerate(groups(3, table(VOCABULARY, VOCABULARY, seed=4)))
    ]


def stripped(one: Trajectory) -> Trajectory:
    return replace(one, chains=tuple(replace(row, routes=None) for row in one.chains))


@pytest.mark.parametrize(("routed", "bare"), [((), 16), ((1, 3), 8), ((0, 1, 2), 4)])
def test_completions_without_routes_are_refused_by_the_key_that_needs_them(routed: tuple[int, ...], bare: int) -> None:
    said = rf"train\.route_flips=true, but {bare} of the step's 16 completions have no routes"
    with pytest.raises(DataError, match=said):
        asyncio.run(update_of({"train": {"route_flips": True}})(with_routes(*routed), 3, Stopwatch()))


@pytest.mark.parametrize("routed", [(), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_routes_that_the_run_does_not_ask_for_any_more_are_left_out(routed: tuple[int, ...]) -> None:
    assert update_of({})._samples_of(with_routes(*routed)).routes is None
