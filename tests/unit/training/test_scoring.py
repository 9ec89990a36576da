"""All scores of a step: one request for each group of ranks, each number at its position, and teachers' own prompts."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from launcher import wire
from launcher.controller.group import WorkerGroup
from launcher.controller.roles import BatchCalls, LearnerGroup, LearnerGroups
from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.config.beside import frozen_folders
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.data.rows import RankRows
from rl_megatron.data.samples import micro_batch_for_pass, single_turns, to_samples
from rl_megatron.errors import DataError, WorkerFailure
from rl_megatron.feature import step_hooks
from rl_megatron.features.teachers.step import make_hooks as teachers_of
from rl_megatron.features.teachers.step import teacher_samples
from rl_megatron.interfaces import ForwardPass, RunComponents
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.scores import Packers, RankTasks, ScoredSamples, score_batch
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import (
    Batch,
    Completion,
    Loss,
    LossInputs,
    Metric,
    ParallelDims,
    Prompt,
    RolloutGroup,
    Samples,
    Scores,
    StepResult,
    Want,
)
from tests.completions import completion, trajectory
from tests.samples import sequences_of, values

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
        self.held = [RankRows() for _ in range(dp)]
        self.asked: list[list[ForwardPass]] = []

    def send(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        assert name == "score"
        given = {rank: wire.unpack(wire.pack(one)) for rank, one in arguments.items()}
        self.asked.append(list(given[0][0]))
        return [self.scored(rank, *one) for rank, one in given.items()]

    async def gather(self, answers: list[Any]) -> list[Any]:
        return answers

    def scored(self, rank: int, passes: list[ForwardPass], share: Any) -> list[tuple[dict[Want, list[Tensor]], float]]:
        rows, answers = self.held[rank].micro_batches(share), []
        for one in passes:
            seen = [
                micro_batch_for_pass(m, replays=one.replays_routes, last_tokens=one.appends_last_targets) for m in rows
            ]
            assert all(len(m.input_ids) <= MOST for m in seen)
            found = {what: [self.said(one.role, what, m.input_ids) for m in seen] for what in one.outputs}
            answers.append((found, SECONDS.get(one.role, 1.0)))
        return answers

    def said(self, role: str, what: Want, tokens: Tensor) -> Tensor:
        found = table(role, what)[tokens]
        return found if what != "top" else torch.stack([tokens.float(), found], 1)[:, :, None]


def samples() -> Samples:
    lengths, g = torch.tensor([30, 18, 20, 28, 24, 24, 26, 22]), torch.Generator().manual_seed(0)
    n = int(lengths.sum())
    tokens = torch.randint(0, 64, (n + 1,), generator=g)
    return sequences_of(lengths, input_ids=tokens[:-1], targets=tokens[1:], mask=torch.rand(n, generator=g) > 0.3)


def roles_of(config: RunConfig, groups: Mapping[str, Ranks]) -> RunComponents:
    calls_of = {
        role: BatchCalls(cast(WorkerGroup, its), ParallelDims(dp=len(its.held))) for role, its in groups.items()
    }
    of = {role: role if role in groups else "learner" for role in ("policy", "critic", *frozen_folders(config))}
    if not config.algorithm.needs_critic:
        del of["critic"]
    models = {role: LearnerGroup(cast(WorkerGroup, groups[name]), role, calls_of[name]) for role, name in of.items()}
    unused: Any = None
    return RunComponents(
        learners={role: model for role, model in models.items() if role in ("policy", "critic")},
        frozen_models={role: model for role, model in models.items() if role not in ("policy", "critic")},
        engine=unused,
        weight_sync=unused,
        shared_ranks=[
            LearnerGroups([model for role, model in models.items() if of[role] == name], calls)
            for name, calls in calls_of.items()
        ],
    )


def judged(
    config: RunConfig, ranks: Mapping[str, Ranks], samples: Samples, groups: Sequence[RolloutGroup], watch: Stopwatch
) -> ScoredSamples:
    """What all models say of the samples of the groups."""
    roles = roles_of(config, ranks)
    judges = [found for hooks in step_hooks(config, roles) if (found := hooks.judges(samples, groups)) is not None]
    packers = Packers(config=config, attention_cost=0.0)
    return asyncio.run(score_batch(config, roles, packers, samples, 1, watch, *judges))


def asked(*keys: str, sources: Sequence[str] = (), **groups: Ranks) -> tuple[ScoredSamples, dict[str, float]]:
    """``sources``: of each sequence."""
    config, watch = load_config("tiny_cpu", [*GIVEN, *keys]), Stopwatch()
    prompts = [Prompt(id="", text="", token_ids=(1,), answer="", source=one) for one in sources]
    of = [RolloutGroup(prompt=prompt, trajectories=(trajectory([1]),)) for prompt in prompts]
    return judged(config, groups, samples(), of, watch), watch.row()


def assert_right(found: ScoredSamples, critic: str) -> None:
    given = samples()
    for column, role, what in (
        (found.current, "policy", "logprobs"),
        (found.samples.old_logprobs, "policy", "logprobs"),
        (found.samples.ref_logprobs, "reference", "logprobs"),
        (found.samples.old_values, critic, "values"),
    ):
        assert torch.equal(column, table(role, cast(Want, what))[given.input_ids])
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
    assert ranks.asked[0][0].outputs == {"logprobs", "values"}
    assert "seconds/values" not in row


TEACHERS = [f"algorithm.kl.teachers.{key}" for key in ("one.path=tests", "two.path=conf", "three.path=docs")]
MIXTURE = ("data.type=mixture", *(f"data.sources.{name}.type=arithmetic" for name in ("sums", "more", "all")))
OF_SOURCE = [("sums", "more", "all")[number] for number in (0, 0, 1, 1, 0, 2, 1, 2)]  # of each sequence


def test_teachers_on_ranks_are_asked_for_their_sources_alone_and_weighed() -> None:
    weights = {"one": 1.0, "two": 3.0, "three": 1.0}
    of = {"one": ("sums", "more"), "two": ("more",), "three": ("all",)}
    keys = [f"algorithm.kl.teachers.{name}.sources=[{','.join(its)}]" for name, its in of.items()]
    keys += ["algorithm=distill", *TEACHERS, "algorithm.kl.teachers.two.weight=3", *MIXTURE]
    keys += ["roles.layouts.teacher_two.tp=1"]
    ranks = {"learner": Ranks(2), "teacher_one": Ranks(2), "teacher_two": Ranks(1), "teacher_three": Ranks(2)}
    found, row = asked(*keys, sources=OF_SOURCE, **ranks)
    given, wanted = samples(), torch.zeros(len(samples().targets), dtype=torch.float64)
    for source in ("sums", "more", "all"):
        here = torch.tensor([one == source for one in OF_SOURCE]).repeat_interleave(given.cu_seqlens.diff())
        its = [name for name in weights if source in of[name]]
        for name in its:
            said = table(f"teacher_{name}", "logprobs")[given.input_ids].double()
            wanted += here * said * weights[name] / sum(weights[one] for one in its)
    torch.testing.assert_close(found.samples.ref_logprobs.double(), wanted, rtol=1e-6, atol=1e-6)
    for name, its in of.items():
        held = sum(len(rows["input_ids"]) for one in ranks[f"teacher_{name}"].held for rows in [one._rows])
        assert held == sum(source in its for source in OF_SOURCE), name
        assert len(ranks[f"teacher_{name}"].asked) == 1
    assert row["seconds/reference"] > 0


def test_the_tokens_of_a_distribution_are_those_of_each_sources_teacher() -> None:
    keys = ["algorithm=gkd", *TEACHERS[:2], *MIXTURE[:3]]
    keys += ["algorithm.kl.teachers.one.sources=[sums]", "algorithm.kl.teachers.two.sources=[more]"]
    of_more, given = torch.tensor([0, 1, 0, 0, 0, 0, 0, 1]), samples()
    sources = ["more" if one else "sums" for one in of_more]
    found, _ = asked(*keys, sources=sources, learner=Ranks(2), teacher_one=Ranks(2), teacher_two=Ranks(2))
    second = of_more.bool().repeat_interleave(given.cu_seqlens.diff())
    one, two = (table(f"teacher_{name}", "top")[given.input_ids] for name in ("one", "two"))
    assert torch.equal(found.samples.ref_top[:, 0, 0], given.input_ids.float())
    assert torch.equal(found.samples.ref_top[:, 1, 0], torch.where(second, two, one))


def test_a_teacher_without_a_prompt_in_the_step_is_not_asked() -> None:
    keys = ["algorithm=distill", *TEACHERS[:2], *MIXTURE[:3]]
    keys += ["algorithm.kl.teachers.one.sources=[sums]", "algorithm.kl.teachers.two.sources=[more]"]
    idle = Ranks(2)
    found, _ = asked(*keys, sources=["sums"] * 8, learner=Ranks(2), teacher_one=Ranks(2), teacher_two=idle)
    assert not idle.asked
    assert torch.equal(found.samples.ref_logprobs, table("teacher_one", "logprobs")[samples().input_ids])


# Teachers that read a prompt of their own: what they say is of the tokens that the policy sampled, where it did.
KEY = "algorithm.kl.teachers"
OWN = {"a": (9, 8, 7, 6, 5), "b": (4,), "c": (3, 3)}  # what a teacher reads in place of each prompt
LENGTHS = {"a": (3, 5), "b": (2, 7), "c": (4, 1)}  # of completions


def said_after(role: str, text: Sequence[int], target: int) -> float:
    """What a model says of a token behind a text: it depends on every token before it."""
    return -(1 + crc32(f"{role} {list(text)} {target}".encode()) % 1000) / 100


class Readers(Ranks):
    """Ranks whose models read the whole of a sequence."""

    @override
    def scored(self, rank: int, passes: list[ForwardPass], share: Any) -> list[tuple[dict[Want, list[Tensor]], float]]:
        rows = self.held[rank].micro_batches(share)
        return [({what: [self.read(one.role, what, m) for m in rows] for what in one.outputs}, 1.0) for one in passes]

    def read(self, role: str, what: Want, rows: Samples) -> Tensor:
        out = torch.zeros(len(rows.input_ids))
        for first, stop in zip(rows.cu_seqlens.tolist(), rows.cu_seqlens[1:].tolist(), strict=False):
            for at in range(first, stop):
                out[at] = said_after(role, rows.input_ids[first : at + 1].tolist(), int(rows.targets[at]))
        return (
            out if what != "top" else torch.stack([rows.targets.float(), out], 1)[:, :, None] * rows.mask[:, None, None]
        )


def groups() -> list[RolloutGroup]:
    return [
        RolloutGroup(
            prompt=Prompt(
                id=name, text="", token_ids=(1, 2), answer="", source="ab"[name == "b"], read_by={"me": OWN[name]}
            ),
            trajectories=tuple(trajectory([length], seed=length) for length in LENGTHS[name]),
        )
        for name in OWN
    ]


@pytest.mark.parametrize(
    ("algorithm", "keys", "role"),
    [
        ("distill", [], "policy"),
        ("gkd", [], "policy"),
        ("gkd", ["algorithm.kl.reference_update_rate=0.1"], "reference"),
        ("distill", [f"{KEY}.me.path=tests"], "teacher_me"),
        ("gkd", [f"{KEY}.me.path=tests", "roles.layouts.teacher_me.tp=1"], "teacher_me"),
        (
            "distill",
            [f"{KEY}.me.sources=[b]", f"{KEY}.other.path=conf", f"{KEY}.other.sources=[a]", "data.type=mixture"]
            + [f"data.sources.{name}.type=arithmetic" for name in "ab"],
            "policy",
        ),
    ],
)
def test_each_sampled_token_is_judged_behind_the_teachers_prompt(algorithm: str, keys: list[str], role: str) -> None:
    given = [f"algorithm={algorithm}", f"{KEY}.me.prompt={{prompt}}", f"{KEY}.me.max_prompt_tokens=8", *keys]
    config = load_config("tiny_cpu", ["learner.ep=1", "learner.dp=2", *given])
    names = ["learner", "teacher_me", "teacher_other"]
    ranks = {name: Readers(1 if name == "teacher_me" and "layouts" in str(keys) else 2) for name in names}
    if role != "teacher_me":
        del ranks["teacher_me"]
    samples, watch = to_samples(groups()), Stopwatch()
    found = judged(config, ranks, samples, groups(), watch)
    wanted, old = [np.zeros(len(samples.targets), np.float32) for _ in range(2)]
    at = 0
    for group in groups():
        other = bool(config.source_names) and group.prompt.source == "a"
        for one in group.trajectories:
            tokens = one.chains[0].token_ids.tolist()
            for place in range(1, len(tokens)):
                old[at] = said_after("policy", tokens[:place], tokens[place])
                text = tokens[:place] if other else [*OWN[group.prompt.id], *tokens[2:place]]
                if other or place >= 2:
                    wanted[at] = said_after("teacher_other" if other else role, text, tokens[place])
                at += 1
    np.testing.assert_allclose(found.samples.ref_logprobs, wanted, rtol=1e-6)
    np.testing.assert_array_equal(found.samples.old_logprobs, old)
    if algorithm == "gkd":
        np.testing.assert_array_equal(found.samples.ref_top[:, 0, 0], samples.targets * samples.mask)
        np.testing.assert_array_equal(found.samples.ref_top[:, 1, 0], wanted)
    assert watch.row()["seconds/reference"] > 0
    of_teacher = [] if role == "teacher_me" else [[role]]
    assert [[one.role for one in asked] for asked in ranks["learner"].asked] == [*of_teacher, ["policy"]]


def test_what_a_server_reads_may_be_longer_than_a_micro_batch_of_the_learner() -> None:
    of = ["server=http://127.0.0.1:9", "engine=vllm", "path=tests", "prompt={prompt}", "max_prompt_tokens=900"]
    keys = [f"{KEY}.me.{key}" for key in of]
    config = load_config("tiny_cpu", ["algorithm=distill", "learner.max_tokens_per_micro_batch=64", *keys])
    long = [replace(one, prompt=replace(one.prompt, read_by={"me": (1,) * 800})) for one in groups()]
    hooks = teachers_of(config, cast(Any, SimpleNamespace(models={})))
    assert hooks is not None
    (judge,) = hooks.judges(to_samples(groups()), long).judges
    assert judge.read is not None
    batch = Packers(config=config, attention_cost=0.0).pack_untrained(judge.read, "teacher_me", judge.longest)
    assert sorted(int(one) for row in batch.sequences for part in row for one in part) == [*range(6)]


def test_a_place_in_the_prompt_is_filled_with_the_best_other_completion_that_is_right() -> None:
    """By hand: of each row, what is read before its own tokens. An end token is not shown."""
    first = [trajectory([3], seed=1, total=1.0), trajectory([2], seed=2, total=0.0), trajectory([4], seed=3, total=2.0)]
    cut = trajectory([3], seed=4, total=1.0, finish="length")
    prompt = Prompt(id="p", text="", token_ids=(1, 2), answer="", read_by={"me": (9, -1, 8)})
    both = [
        RolloutGroup(prompt=prompt, trajectories=tuple(first)),
        RolloutGroup(prompt=prompt, trajectories=(cut, trajectory([2], seed=5, total=0.9))),
    ]
    sampled = [one.chains[0].token_ids[2:].tolist() for group in both for one in group.trajectories]
    best, second = [9, *sampled[2][:-1], 8], [9, *sampled[0][:-1], 8]
    before = [best, best, second, [1, 2], [9, *sampled[3], 8]]  # the cut one has no right one beside it, but is whole
    for part in (np.arange(5), np.array([3, 1])):
        read = teacher_samples(both, "me", part, success_reward=1.0)
        ends = read.cu_seqlens.tolist()
        for number, first_at, stop in zip(part.tolist(), ends, ends[1:], strict=False):
            row = [*read.input_ids[first_at:stop].tolist(), int(read.targets[stop - 1])]
            assert row == before[number] + sampled[number]
            assert read.mask[first_at:stop].tolist() == [at >= len(before[number]) for at in range(1, len(row))]


# Corrections and mismatch metrics of an update come from the log-probs that the engine reported.
SAMPLED_LENGTHS, GROUP = (3, 5, 2, 6), 4


def learner_says(samples: Samples) -> Tensor:
    """A learner's log-probs: some function of the tokens."""
    return -((samples.targets * 7 % 13).float() / 5 + 0.1)


@dataclass
class Learner:
    """Scores by the function above; a step is the loss alone, on a policy that has not moved."""

    rows: list[dict[str, float]] = field(default_factory=list)

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        return {"logprobs": [[learner_says(m) for m in row] for row in batch.micro_batches]}

    async def step(self, learning_rate: float) -> StepResult:
        return StepResult(grad_norm=0.0)

    async def free_step(self) -> None:
        """It keeps nothing of a batch."""

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
        (samples,) = batch.micro_batches[0]
        ids, columns = sequence_ids(samples.cu_seqlens), samples.columns
        inputs = {k: v for k, v in columns.items() if k not in ("input_ids", "targets")}
        output = loss(
            LossInputs(
                **inputs,
                logprobs=learner_says(samples).requires_grad_(),
                entropy=torch.zeros(len(ids)),
                segment_ids=ids,
                segment_sum=partial(segment_sum, ids=ids, num_segments=samples.num_sequences),
                num_tokens=batch.num_tokens,
                num_sequences=batch.num_sequences,
            )
        )
        means: dict[str, Metric[float]] = {n: Metric(value=v.item()) for n, v in values(output, "mean").items()}
        return {"loss": Metric(value=float(output.loss.detach())), **means}


def sampled() -> list[Completion]:
    return [
        completion([11 * s + t for t in range(length)], [-0.3 - 0.37 * ((s + 2 * t) % 5) for t in range(length)])
        for s, length in enumerate(SAMPLED_LENGTHS)
    ]


def one_group() -> list[RolloutGroup]:
    prompt = Prompt(id="p", text="p", token_ids=(1, 2), answer="")
    return [single_turns(prompt, sampled(), rewards=[float(s % 2) for s in range(GROUP)])]


def update(**algorithm: Any) -> Row:
    config = RunConfig.model_validate({"algorithm": algorithm, "train": {"minibatches": 1}})
    learner: Any = Learner()
    roles = RunComponents(learners={"policy": learner}, frozen_models={}, engine=learner, weight_sync=learner)
    return asyncio.run(PolicyUpdate(config=config, roles=roles, attention_cost=0.0)(one_group(), 1, Stopwatch()))


def gaps() -> list[list[float]]:
    """Learner less engine of each token of each completion, in plain Python."""
    return [
        [-(t * 7 % 13) / 5 - 0.1 - engine for t, engine in zip(c.token_ids.tolist(), c.logprobs.tolist(), strict=True)]
        for c in sampled()
    ]


def expected(correction: dict[str, Any]) -> list[float]:
    out = []
    for of_sequence in gaps():
        mean = sum(of_sequence) / len(of_sequence)
        vetoed = any(math.exp(gap) < correction.get("veto", 0.0) for gap in of_sequence)
        for gap in of_sequence:
            weight = math.exp(mean if correction.get("level") == "sequence" else gap)
            low, high = correction.get("low", 0.0), correction.get("high", 2.0)
            inside = low <= weight <= high
            weight = {
                "truncate": min(max(weight, low), high),
                "mask": weight if inside else 0.0,
                "band": float(inside),
                "none": 1.0,
            }[correction["mode"]]
            out.append(0.0 if vetoed else weight)
    return out


@pytest.mark.parametrize(
    "correction",
    [
        {"mode": "truncate"},
        {"mode": "truncate", "level": "sequence", "high": 1.1},
        {"mode": "mask", "low": 0.5, "high": 1.5},
        {"mode": "band", "level": "sequence", "low": 0.8, "high": 1.2},
        {"mode": "none", "veto": 0.2},
    ],
    ids=["TIS", "sequence", "mask", "band", "veto"],
)
def test_weights_are_learner_over_engine(correction: dict[str, Any]) -> None:
    row, weights = update(correction=correction), expected(correction)
    assert len(set(weights)) > 1
    assert row["correction/weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert row["correction/dropped_fraction"] == pytest.approx(weights.count(0.0) / len(weights))


def test_the_row_tells_how_many_tokens_m2po_leaves_out() -> None:
    """The largest squares, until the mean of the rest is at most the limit."""
    squares = sorted(gap**2 for of_sequence in gaps() for gap in of_sequence)
    row = update(objective="importance", tokens={"choose": "second_moment"}, parameters={"second_moment": 0.5})
    kept = max(n for n in range(len(squares) + 1) if sum(squares[:n]) <= 0.5 * n)
    assert 1 < kept < len(squares) - 1
    assert row["tokens/chosen_fraction"] == pytest.approx(kept / len(squares))


def test_the_row_tells_the_mismatch_of_the_batch() -> None:
    row, every = update(), [gap for of_sequence in gaps() for gap in of_sequence]
    assert row["mismatch/k1"] == pytest.approx(-sum(every) / len(every), rel=1e-5)
    assert of_gaps(row) == pytest.approx(of_gaps_expected(), rel=1e-5)


OF_GAPS = ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "kl/rollout")


def of_gaps(row: Row) -> list[Any]:
    return [row[name] for name in OF_GAPS]


def of_gaps_expected() -> list[float]:
    every = [gap for of_sequence in gaps() for gap in of_sequence]
    sizes = [abs(gap) for gap in every]
    return [sum(sizes) / len(every), max(sizes), sum(math.expm1(gap) - gap for gap in every) / len(every)]


def test_old_logprobs_of_the_engine_have_the_learners_gap_where_it_scores_and_else_none() -> None:
    """0 would say that both agree, though nobody compared them."""
    keys = {"objective": "importance", "old_logprobs": "rollout"}
    assert not update(**keys).keys() & OF_GAPS
    row = update(**keys, tokens={"choose": "second_moment"}, parameters={"second_moment": 0.5})
    assert of_gaps(row) == pytest.approx(of_gaps_expected(), rel=1e-5)


# Concurrent calls to models: all start before the first is awaited, and one that fails ends the others.
LIMIT = 300.0


async def test_they_work_at_the_same_time_and_are_asked_in_order() -> None:
    watch, asked = Stopwatch(), list[str]()
    reference_done = asyncio.Event()

    async def policy() -> str:
        asked.append("policy")
        await reference_done.wait()  # for ever, if it came after
        return "log-probs"

    async def reference() -> str:
        asked.append("reference")
        reference_done.set()
        return "reference log-probs"

    async with asyncio.timeout(LIMIT), RankTasks(watch) as at_once:
        first, second = at_once.start("logprobs", policy()), at_once.start("reference", reference())
        assert [await at_once.end(first), await at_once.end(second)] == ["log-probs", "reference log-probs"]
    assert asked == ["policy", "reference"]
    row = watch.row()
    assert row["seconds/logprobs"] + row["seconds/reference"] <= row["seconds/step"]


async def test_the_first_that_fails_is_raised_and_the_others_are_left() -> None:
    left = list[str]()

    async def dies() -> None:
        raise WorkerFailure("critic rank 1")

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.append("policy")
            raise

    async def ask() -> None:
        async with asyncio.timeout(LIMIT), RankTasks(Stopwatch()) as at_once:
            critic, _ = at_once.start("critic", dies()), at_once.start("train", hangs())
            await at_once.end(critic)

    with pytest.raises(WorkerFailure, match="critic rank 1"):
        await ask()
    assert left == ["policy"]


async def test_an_error_of_the_one_who_asks_is_raised_and_all_are_left() -> None:
    left = list[str]()

    async def ask() -> None:
        async def hangs(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # its end takes a while, and is waited for
                left.append(name)

        async with asyncio.timeout(LIMIT), RankTasks(Stopwatch()) as at_once:
            at_once.start("critic", hangs("critic"))
            at_once.start("train", hangs("policy"))
            await asyncio.sleep(0)
            raise DataError("these completions have no routes")

    with pytest.raises(DataError, match="have no routes"):
        await ask()
    assert left == ["critic", "policy"]


def test_ranks_do_not_wait_for_the_metrics_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, metrics = threading.Event(), Packer.metrics

    class Trains(Learner):
        async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
            asked.set()
            return await super().backward(batch, loss)

    def late(packer: Packer, batches: list[Batch]) -> dict[str, Any]:
        assert asked.wait(LIMIT)
        return dict(metrics(packer, batches))

    monkeypatch.setattr(Packer, "metrics", late)
    learner: Any = Trains()
    roles = RunComponents(learners={"policy": learner}, frozen_models={}, engine=learner, weight_sync=learner)
    config = RunConfig.model_validate({"train": {"minibatches": 1}})
    row = asyncio.run(PolicyUpdate(config=config, roles=roles, attention_cost=0.0)(one_group(), 1, Stopwatch()))
    assert row["tokens/train"] == sum(SAMPLED_LENGTHS) + len(
        SAMPLED_LENGTHS
    )  # of a prompt of two tokens, one is a position
