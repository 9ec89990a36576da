"""All scores of a step: one request for each group of ranks, and each number at the position it is of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import pytest
import torch
from torch import Tensor

from launcher.controller.group import WorkerGroup
from launcher.controller.roles import LearnerGroup, LearnerGroups, Plane
from launcher.wire import messages
from rl_megatron.config.beside import frozen_folders
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.held import HeldRows
from rl_megatron.data.samples import as_seen
from rl_megatron.interfaces import Pass, Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.measures import Measured
from rl_megatron.training.scores.requests import Packers, measured
from rl_megatron.types import ParallelDims, Samples, Want
from tests.samples import sequences_of

MOST = 48  # positions of a micro-batch
GIVEN = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "learner.ep=1", "learner.dp=2", "train.minibatches=1")
GIVEN += (f"learner.max_tokens_per_micro_batch={MOST}", "rollout.max_new_tokens=16", "rollout.max_prompt_tokens=16")
APART = ("roles.critic=separate", "roles.reference=separate", "roles.layouts.reference.dp=1")
SECONDS = {"policy": 1.0, "reference": 2.0, "critic": 5.0}
PASS_OF = {"logprobs": "policy", "reference": "reference", "values": "critic"}


def table(role: str, what: Want) -> Tensor:
    """What a role says after each token."""
    return torch.randn(64, generator=torch.Generator().manual_seed(crc32(f"{role} {what}".encode())))


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
            found = {what: [self.said(one.role, what, m.input_ids) for m in seen] for what in one.want}
            answers.append((found, SECONDS.get(one.role, 1.0)))
        return answers

    def said(self, role: str, what: Want, tokens: Tensor) -> Tensor:
        found = table(role, what)[tokens]
        return found if what != "top" else torch.stack([tokens.float(), found], 1)[:, :, None]


def samples() -> Samples:
    lengths, g = torch.tensor([30, 18, 20, 28, 24, 24, 26, 22]), torch.Generator().manual_seed(0)
    n = int(lengths.sum())
    tokens = torch.randint(0, 64, (n + 1,), generator=g)
    mask = torch.rand(n, generator=g) > 0.3
    return sequences_of(lengths, input_ids=tokens[:-1], targets=tokens[1:], mask=mask)


def roles_of(config: RunConfig, groups: Mapping[str, Ranks]) -> Roles:
    planes = {role: Plane(cast(WorkerGroup, ranks), ParallelDims(dp=len(ranks.held))) for role, ranks in groups.items()}
    of = {role: role if role in groups else "learner" for role in ("policy", "critic", *frozen_folders(config))}
    if not config.algorithm.needs_critic:
        del of["critic"]
    models = {role: LearnerGroup(cast(WorkerGroup, groups[name]), role, planes[name]) for role, name in of.items()}
    unused: Any = None
    return Roles(
        learners={role: model for role, model in models.items() if role in ("policy", "critic")},
        frozen={role: model for role, model in models.items() if role not in ("policy", "critic")},
        engine=unused,
        weights=unused,
        together=[
            LearnerGroups([model for role, model in models.items() if of[role] == name], plane)
            for name, plane in planes.items()
        ],
    )


def asked(*keys: str, source_of: Tensor | None = None, **groups: Ranks) -> tuple[Measured, dict[str, float]]:
    config, watch = load_config("tiny_cpu", [*GIVEN, *keys]), Stopwatch()
    packers, given = Packers(config=config, attention_cost=0.0), replace(samples(), source_of=source_of)
    found = asyncio.run(measured(config, roles_of(config, groups), packers, given, 1, watch, groups=()))
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


TEACHERS = [f"algorithm.kl.teachers.{key}" for key in ("one.path=tests", "two.path=conf", "three.path=docs")]
MIXTURE = ("data.type=mixture", *(f"data.sources.{name}.type=arithmetic" for name in ("sums", "more", "all")))
OF_SOURCE = torch.tensor([0, 0, 1, 1, 0, 2, 1, 2])  # of each sequence, in the order of the mixture


def test_teachers_on_ranks_are_asked_for_their_sources_alone_and_weighed() -> None:
    weights = {"one": 1.0, "two": 3.0, "three": 1.0}
    of = {"one": ("sums", "more"), "two": ("more",), "three": ("all",)}
    keys = [f"algorithm.kl.teachers.{name}.sources=[{','.join(its)}]" for name, its in of.items()]
    keys += ["algorithm=distill", *TEACHERS, "algorithm.kl.teachers.two.weight=3", *MIXTURE]
    keys += ["roles.layouts.teacher_two.tp=1"]
    ranks = {"learner": Ranks(2), "teacher_one": Ranks(2), "teacher_two": Ranks(1), "teacher_three": Ranks(2)}
    found, row = asked(*keys, source_of=OF_SOURCE, **ranks)
    given, wanted = samples(), torch.zeros(len(samples().targets), dtype=torch.float64)
    for number, source in enumerate(("sums", "more", "all")):
        here = (number == OF_SOURCE).repeat_interleave(given.cu_seqlens.diff())
        its = [name for name in weights if source in of[name]]
        for name in its:
            said = table(f"teacher_{name}", "logprobs")[given.input_ids].double()
            wanted += here * said * weights[name] / sum(weights[one] for one in its)
    assert found.samples.ref_logprobs is not None
    torch.testing.assert_close(found.samples.ref_logprobs.double(), wanted, rtol=1e-6, atol=1e-6)
    for name, its in of.items():
        numbers = [("sums", "more", "all").index(source) for source in its]
        held = sum(len(rows["input_ids"]) for one in ranks[f"teacher_{name}"].held for rows in [one._rows])
        assert held == sum(int(number) in numbers for number in OF_SOURCE), name
        assert len(ranks[f"teacher_{name}"].asked) == 1
    assert row["seconds/reference"] > 0


def test_the_tokens_of_a_distribution_are_those_of_each_sources_teacher() -> None:
    keys = ["algorithm=gkd", *TEACHERS[:2], *MIXTURE[:3]]
    keys += ["algorithm.kl.teachers.one.sources=[sums]", "algorithm.kl.teachers.two.sources=[more]"]
    source_of, given = torch.tensor([0, 1, 0, 0, 0, 0, 0, 1]), samples()
    found, _ = asked(*keys, source_of=source_of, learner=Ranks(2), teacher_one=Ranks(2), teacher_two=Ranks(2))
    second = source_of.bool().repeat_interleave(given.cu_seqlens.diff())
    one, two = (table(f"teacher_{name}", "top")[given.input_ids] for name in ("one", "two"))
    assert found.samples.ref_top is not None
    assert torch.equal(found.samples.ref_top[:, 0, 0], given.input_ids.float())
    assert torch.equal(found.samples.ref_top[:, 1, 0], torch.where(second, two, one))


def test_a_teacher_without_a_prompt_in_the_step_is_not_asked() -> None:
    keys = ["algorithm=distill", *TEACHERS[:2], *MIXTURE[:3]]
    keys += ["algorithm.kl.teachers.one.sources=[sums]", "algorithm.kl.teachers.two.sources=[more]"]
    idle = Ranks(2)
    found, _ = asked(*keys, source_of=torch.zeros(8), learner=Ranks(2), teacher_one=Ranks(2), teacher_two=idle)
    assert not idle.asked
    assert found.samples.ref_logprobs is not None
    assert torch.equal(found.samples.ref_logprobs, table("teacher_one", "logprobs")[samples().input_ids])
