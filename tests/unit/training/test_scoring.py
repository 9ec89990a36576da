"""All scores of a step: one request for each group of ranks, and each number at the position it is of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from launcher.controller.group import WorkerGroup
from launcher.controller.learner import LearnerGroup, LearnerGroups
from launcher.controller.plane import Plane
from launcher.wire import messages
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.gathered import as_seen
from rl_megatron.data.held import HeldRows
from rl_megatron.interfaces import Pass, Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.measures import Measured
from rl_megatron.training.scores.requests import Packers, measured
from rl_megatron.types import ParallelDims, Samples, Want

MOST = 48  # positions of a micro-batch
GIVEN = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "learner.ep=1", "learner.dp=2", "train.minibatches=1")
GIVEN += (f"learner.max_tokens_per_micro_batch={MOST}", "rollout.max_new_tokens=16", "rollout.max_prompt_tokens=16")
APART = ("roles.critic=separate", "roles.reference=separate", "roles.layouts.reference.dp=1")
SECONDS = {"policy": 1.0, "reference": 2.0, "critic": 5.0}
PASS_OF = {"logprobs": "policy", "reference": "reference", "values": "critic"}


def table(role: str, what: Want) -> Tensor:
    """What a role says after each token."""
    return torch.randn(64, generator=torch.Generator().manual_seed(len(role) * 10 + len(what)))


class Ranks:
    """Data-parallel ranks without a model: a score depends on the input token alone. They build their rows of bytes."""

    def __init__(self, dp: int) -> None:
        self.workers = [SimpleNamespace(rank=rank) for rank in range(dp)]
        self.held = [HeldRows() for _ in range(dp)]
        self.asked: list[list[Pass]] = []

    def begin(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        assert name == "score"
        given = {rank: messages.unpack(messages.pack(one)) for rank, one in arguments.items()}
        self.asked.append(list(given[0][0]))
        return [self.scored(rank, *one) for rank, one in given.items()]

    async def gather(self, answers: list[Any]) -> list[Any]:
        return answers

    def scored(self, rank: int, passes: list[Pass], share: Any) -> list[tuple[dict[Want, list[Tensor]], float]]:
        rows, answers = self.held[rank].take(share), []
        for one in passes:
            seen = [as_seen(m, replays=one.replays, last_tokens=one.last_tokens) for m in rows]
            assert all(len(m.input_ids) <= MOST for m in seen)
            found = {what: [table(one.role, what)[m.input_ids] for m in seen] for what in one.want}
            answers.append((found, SECONDS[one.role]))
        return answers


def samples() -> Samples:
    lengths, g = torch.tensor([30, 18, 20, 28, 24, 24, 26, 22]), torch.Generator().manual_seed(0)
    n = int(lengths.sum())
    tokens = torch.randint(0, 64, (n + 1,), generator=g)
    return Samples(
        input_ids=tokens[:-1],
        targets=tokens[1:],
        mask=torch.rand(n, generator=g) > 0.3,
        advantages=torch.zeros(n),
        rollout_logprobs=torch.zeros(n),
        old_logprobs=torch.zeros(n),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
    )


def roles_of(config: RunConfig, groups: Mapping[str, Ranks]) -> Roles:
    planes = {role: Plane(cast(WorkerGroup, ranks), ParallelDims(dp=len(ranks.held))) for role, ranks in groups.items()}
    names = ["policy", *(["critic"] if config.algorithm.needs_critic else []), "reference"]
    models = {
        role: LearnerGroup(
            cast(WorkerGroup, groups.get(role, groups["learner"])), role, planes.get(role, planes["learner"])
        )
        for role in names
    }
    unused: Any = None
    return Roles(
        learners={role: model for role, model in models.items() if role != "reference"},
        frozen={"reference": models["reference"]},
        engine=unused,
        weights=unused,
        together=[
            LearnerGroups(
                [one for role, one in models.items() if (role if role in groups else "learner") == name], plane
            )
            for name, plane in planes.items()
        ],
    )


def asked(*keys: str, **groups: Ranks) -> tuple[Measured, dict[str, float]]:
    config, watch = load_config("tiny_cpu", [*GIVEN, *keys]), Stopwatch()
    packers = Packers(config=config, attention_cost=0.0)
    found = asyncio.run(measured(config, roles_of(config, groups), packers, samples(), 1, watch))
    return found, watch.row()


def assert_right(found: Measured, critic: str) -> None:
    given = samples()
    for column, role, what in (
        (found.current, "policy", "logprobs"),
        (found.samples.old_logprobs, "policy", "logprobs"),
        (found.samples.ref_logprobs, "reference", "logprobs"),
        (found.samples.old_values, critic, "values"),
    ):
        assert column is not None
        assert torch.equal(column, table(role, cast(Want, what))[given.input_ids])
    assert found.next_values is not None
    assert torch.equal(found.next_values, table(critic, "values")[given.targets[given.cu_seqlens[1:] - 1]])


def test_models_on_the_same_ranks_are_asked_by_one_request_that_is_counted_for_the_phase_of_each() -> None:
    ranks = Ranks(2)
    found, row = asked(learner=ranks)
    assert_right(found, "critic")
    assert [[one.role for one in request] for request in ranks.asked] == [["policy", "reference", "critic"]]
    spent = {role: row[f"seconds/{phase}"] for phase, role in PASS_OF.items()}
    parts = {role: seconds / sum(spent.values()) for role, seconds in spent.items()}
    assert parts == pytest.approx({role: seconds / 8 for role, seconds in SECONDS.items()}, abs=1e-3)
    assert sum(spent.values()) <= row["seconds/step"]


def test_each_group_of_ranks_is_asked_once_in_its_own_layout() -> None:
    groups = {"learner": Ranks(2), "critic": Ranks(2), "reference": Ranks(1)}
    found, _ = asked(*APART, **groups)
    assert_right(found, "critic")
    requests = {name: [[one.role for one in request] for request in ranks.asked] for name, ranks in groups.items()}
    assert requests == {"learner": [["policy"]], "critic": [["critic"]], "reference": [["reference"]]}


def test_a_policy_that_is_its_own_critic_says_both_in_one_pass() -> None:
    ranks = Ranks(2)
    found, row = asked("algorithm.critic.backbone=policy", learner=ranks)
    assert_right(found, "policy")
    assert [[one.role for one in request] for request in ranks.asked] == [["policy", "reference"]]
    assert ranks.asked[0][0].want == {"logprobs", "values"}
    assert "seconds/values" not in row
