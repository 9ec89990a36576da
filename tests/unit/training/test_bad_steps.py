"""Steps with little or nothing to train on, and optimizer steps whose gradient is not finite."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, get_ident
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.samples import SupervisedRow, select
from rl_megatron.environments.protocol import EnvironmentStep, Reply
from rl_megatron.environments.registry import EnvironmentFactory
from rl_megatron.errors import DataError, RLMegatronError, StopRequested
from rl_megatron.interfaces import Learner as LearnerProtocol
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.rollout import stream as stream_module
from rl_megatron.rollout.sampler import SourceSampler
from rl_megatron.rollout.stream import Draw, GroupResult, Ledger, Reason
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.training.evaluation import Evaluator
from rl_megatron.training.jobs.rl import RLJob, make_stream
from rl_megatron.training.jobs.warm_start import WarmStart
from rl_megatron.training.jobs.written import DatasetJob, SFTObjective, SupervisedSteps, Unit
from rl_megatron.training.loop import Intervals, Loop
from rl_megatron.training.optimizer_steps import CompletedStep, OptimizerSteps
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import (
    BadMicroBatch,
    Batch,
    Loss,
    Metric,
    ParallelDims,
    Prompt,
    RolloutGroup,
    SkippedStep,
    StepResult,
    Turn,
)
from tests.completions import drawn, finished
from tests.samples import sequences_of
from tests.scripted_engine import Scripted, sampler
from tests.unit.rollout.test_environment_source import PROMPTS, Talks
from tests.unit.training.test_scoring import Learner, one_group

WANTED = 4  # groups of a step


@pytest.fixture(autouse=True)
def _few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_MAX_BATCHES", 2)


TEACHES = one_group()[0]
EQUAL = replace(TEACHES, trajectories=tuple(replace(one, reward=1.0) for one in TEACHES.trajectories))


@dataclass
class Source:
    """Gives the answers that it was given, one for each prompt."""

    answers: Iterator[GroupResult]

    async def groups(self, drawn: Sequence[Draw]) -> list[GroupResult]:
        return [next(self.answers) for _ in drawn]

    async def collect_partials(self) -> None:
        raise AssertionError

    def partial_completion(self, drawn: Draw) -> tuple[()]:
        return ()


class Steps(Learner):
    """A learner that counts its optimizer steps, and weights that are pushed."""

    taken = 0

    async def backward(self, *_: object) -> dict[str, Metric[float]]:
        return {"loss": Metric(value=0.5)}

    async def step(self, learning_rate: float) -> StepResult:
        self.taken += 1
        return StepResult(grad_norm=0.0)

    async def push(self, version: int) -> Any:
        return SimpleNamespace(num_bytes=0, verify_seconds=0.0, quantization_error=None)


def job(folder: Path, answers: Sequence[GroupResult], learner: Any, **sections: dict[str, Any]) -> RLJob:
    rollout = {"prompts_per_step": WANTED, **sections.pop("rollout", {})}
    given = {"train": {"minibatches": 1}, "rollout": rollout, **sections}
    config = RunConfig.model_validate(given)
    roles = RunComponents(learners={"policy": learner}, frozen_models={}, engine=learner, weight_sync=learner)
    prompts = PromptStream([TEACHES.prompt] * 8, seed=0)
    return RLJob(
        config=config,
        roles=roles,
        stream=make_stream(config, prompts, Source(iter(answers)), Ledger(folder / "ledger.jsonl")),
        prompts=prompts,
        evaluation=Evaluator(sampler=sampler(Scripted(str)), sets=(), section=config.eval, last_step=0),
        update=PolicyUpdate(config=config, roles=roles, attention_cost=0.0),
        start_folder=folder,
        recorder=Recorder(folder, config.log, Progress(1, "plain", "run", run_folder=folder)),
        push_route="shared_file",
    )


def step(folder: Path, answers: Sequence[GroupResult], **sections: dict[str, Any]) -> tuple[Row, int]:
    """A step's row, written as the run writes it, and how many optimizer steps it took."""
    learner = Steps()

    async def once() -> Row:
        it = job(folder, answers, learner, **sections)
        row = await it.step(1, Stopwatch())
        await it.recorder.write(row)
        return row

    return asyncio.run(once()), learner.taken


def answers(*groups: RolloutGroup) -> list[GroupResult]:
    return [GroupResult(group=group, rewards=group.rewards) for group in groups]


def test_a_step_trains_on_fewer_groups_than_it_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = answers(EQUAL, TEACHES, EQUAL, EQUAL, *[EQUAL] * 4)
    row, taken = step(tmp_path, given[:4], rollout={"dynamic_sampling": "drop"})
    assert (row["groups/trained"], row["groups/filtered"], taken) == (1, 3, 1)
    assert row["weights/route"] == "shared_file"
    assert "were wanted" not in caplog.text

    row, taken = step(tmp_path, given, rollout={"dynamic_sampling": "refill"})
    assert (row["groups/trained"], row["groups/filtered"], taken) == (1, 7, 1)
    assert "8 prompts left 1 groups to train on, 4 were wanted" in caplog.text


def test_a_refill_draws_as_many_prompts_as_were_left_out(tmp_path: Path) -> None:
    given = answers(EQUAL, TEACHES, TEACHES, EQUAL, TEACHES, EQUAL, TEACHES)
    row, _ = step(tmp_path, given, rollout={"dynamic_sampling": "refill"})
    assert (row["groups/trained"], row["groups/filtered"]) == (4, 3)
    scored = [group.rewards for group in (EQUAL, TEACHES)]
    wanted = (3 * sum(scored[0]) + 4 * sum(scored[1])) / (7 * len(scored[0]))
    assert row["reward/sampled_mean"] == pytest.approx(wanted)
    assert row["tokens/rollout"] == 7 * sum(one.num_sampled for one in TEACHES.trajectories)


@pytest.mark.parametrize("mode", ["off", "drop"])
def test_shares_of_groups_with_all_or_no_correct_completions(tmp_path: Path, mode: str) -> None:
    """Before the filter, by eval.success_reward; a group with a failed reward is left out of both shares."""
    wrong = replace(TEACHES, trajectories=tuple(replace(one, reward=0.5) for one in TEACHES.trajectories))
    given = [*answers(EQUAL, TEACHES, wrong), GroupResult(group=None, reason="reward_error")]
    row, _ = step(tmp_path, given, rollout={"dynamic_sampling": mode})
    assert (row["groups/all_correct"], row["groups/none_correct"]) == (1 / 3, 1 / 3)
    row, _ = step(tmp_path, given, rollout={"dynamic_sampling": mode}, eval={"success_reward": 0.5})
    assert (row["groups/all_correct"], row["groups/none_correct"]) == (2 / 3, 0)


@pytest.mark.parametrize("mode", ["refill", "drop"])
def test_an_empty_step_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Literal["refill", "drop"]) -> None:
    """At a pass rate of 0 or 1 a run of days goes on: the next prompts may teach."""
    row, taken = step(tmp_path, answers(*[EQUAL] * 8), rollout={"dynamic_sampling": mode})
    assert (row["groups/trained"], row["groups/filtered"], row["tokens/train"], taken) == (0, 8, 0, 0)
    assert row["tokens/rollout"] == 8 * sum(one.num_sampled for one in EQUAL.trajectories)
    assert "step 1 has no token to train on and is skipped" in caplog.text


def test_the_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Advantages of rewards above 1 alone: TEACHES has 1 and less, and two that differ."""
    (tmp_path / "above_one.py").write_text("def excess(rewards):\n    return (rewards - 1).clamp(min=0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"advantage_mean": "above_one:excess", "advantage_std": "none"}
    row, taken = step(tmp_path, answers(*[TEACHES] * 8), rollout={"dynamic_sampling": "refill"}, algorithm=own)
    assert (row["groups/trained"], row["groups/filtered"], taken) == (0, 8, 0)
    assert "left out (log.txt names those that failed): 8 for advantages of 0" in caplog.text
    assert {line["reason"] for line in read_jsonl(tmp_path / "ledger.jsonl")} == {"zero_advantages"}


@pytest.mark.parametrize(("mode", "tries"), [("off", 1), ("refill", 2), ("drop", 2)])
def test_rewards_that_all_fail_end_the_run(tmp_path: Path, mode: str, tries: int) -> None:
    failed = [GroupResult(group=None, reason="reward_error")] * 4 * tries
    with pytest.raises(
        DataError, match=rf"left out \(log.txt names those that failed\): {4 * tries} for failed rewards\. Fix these"
    ):
        step(tmp_path, failed, rollout={"dynamic_sampling": mode})


def test_what_left_a_step_without_a_group_is_named(tmp_path: Path) -> None:
    reasons: list[Reason] = ["environment_error", "nothing_sampled", "environment_error", "poison"]
    failed = [GroupResult(group=None, reason=one, problem=f"problem {i}") for i, one in enumerate(reasons)]
    with pytest.raises(
        DataError,
        match=r"1 for servers that ended .*, 2 for failed traj.*, 1 for traj.*; the first of them: problem 0$",
    ):
        step(tmp_path, failed)


def test_a_step_that_poison_alone_empties_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step of one prompt: servers that end under more than one, and than 1 % of all, end the run by themselves."""
    row, taken = step(tmp_path, [GroupResult(group=None, reason="poison")], rollout={"prompts_per_step": 1})
    assert (row["groups/trained"], row["groups/dropped"], taken) == (0, 1, 0)
    assert "1 for servers that ended under them" in caplog.text


def test_a_batch_that_is_left_out_moves_no_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = finished(TEACHES, ["length"] * len(TEACHES.trajectories))
    row, taken = step(tmp_path, answers(cut, cut, cut, cut), algorithm={"drop_truncated": True})
    assert (row["tokens/train"], taken) == (0, 0)
    assert not {name for name, value in row.items() if value != value}  # no mean over nothing
    assert "step 1 has no token to train on" in caplog.text


def test_a_minibatch_whose_every_completion_is_left_out_takes_no_step(tmp_path: Path) -> None:
    """One sequence a minibatch; those that were cut short have no gradient, but Adam's momentum would move weights."""
    cut = finished(TEACHES, ["length", "stop", "length", "stop"])
    algorithm = {"drop_truncated": True}
    rollout = {"prompts_per_step": 1}
    _, taken = step(tmp_path, answers(cut), algorithm=algorithm, train={"minibatches": 4}, rollout=rollout)
    assert taken == 2


async def test_a_stop_before_the_first_step_waits_for_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """It is asked while the run evaluates, which may take long."""

    class Evaluates:
        async def row(self, *_: object) -> Row:
            it.stop.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def wait_closed(self) -> None:
            """Nothing is released."""

    of = job(tmp_path, [], Steps(), warm_start={"steps": 0})
    of.evaluation = cast(Any, Evaluates())
    pace = Intervals(steps=1, metrics=1, evaluations=1, checkpoints=1)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, config={})
    it = Loop(job=of, pace=pace, checkpoints=store, recorder=of.recorder, stop=asyncio.Event())
    with pytest.raises(StopRequested, match="before the first step"):
        await it.run()
    assert not list(tmp_path.iterdir())
    assert it.last_saved is None


async def test_an_end_waits_until_environments_that_failed_are_closed(tmp_path: Path) -> None:
    go, closed = Event(), list[int]()

    class Fails(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            raise ValueError("no")

        async def close(self) -> None:
            await asyncio.to_thread(go.wait)
            closed.append(1)

    of = job(tmp_path, [], Steps())
    trains, own = (sampler(Scripted(lambda _: "a"), EnvironmentFactory(Fails), on_error="drop") for _ in range(2))
    both = SourceSampler(
        engine=trains.engine, rollout=trains.rollout, stop_token_ids=(), seed=0, default=trains, source_samplers={}
    )
    of.evaluation = replace(of.evaluation, sampler=both, own_samplers={"set": own})
    for one in (both.with_engine(trains.engine), own):
        (group,) = await one.groups(drawn(PROMPTS[:1], 1))
        assert group.reason == "environment_error"  # it is not held up
    closing = asyncio.ensure_future(of.close())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not closing.done()
    go.set()
    await closing
    assert len(closed) == 6


class Noted(tuple[Turn, ...]):
    """Turns that note which threads visited them."""

    visitors: ClassVar = set[int]()

    def __iter__(self) -> Iterator[Turn]:
        self.visitors.add(get_ident())
        return super().__iter__()


async def test_no_turn_of_a_batch_is_visited_in_the_thread_of_the_event_loop(tmp_path: Path) -> None:
    """A batch of agents has a million; the loop serves trajectories meanwhile. What trains on them is for others."""
    trajectories = tuple(
        replace(one, chains=tuple(replace(row, turns=Noted(row.turns)) for row in one.chains))
        for one in TEACHES.trajectories
    )
    group = replace(TEACHES, trajectories=trajectories)

    async def trains(*_: object) -> Row:
        return {"tokens/train": 0}

    it = job(tmp_path, answers(*[group] * WANTED), Steps(), log={"samples_per_step": 0})
    trains.hooks = ()  # type: ignore[attr-defined]
    it.update = cast(Any, trains)
    row, loop = await it.step(1, Stopwatch()), get_ident()
    assert row["tokens/rollout"] == WANTED * sum(one.num_sampled for one in TEACHES.trajectories)
    assert Noted.visitors
    assert loop not in Noted.visitors


# Optimizer steps whose gradient is not finite: what is named as the cause, and when a run ends.
THREE_PROMPTS = [
    Prompt(id=name, text=name, token_ids=tokens, answer="")
    for name, tokens in (("short", (1, 2)), ("long", (1, 2, 3)), ("other", (9,)))
]
MADE = StepResult(grad_norm=1.0)


def packed(*sequences: tuple[int, ...]) -> Batch:
    """A micro-batch a sequence, on one rank."""
    tokens = torch.tensor([t for s in sequences for t in s])
    samples = sequences_of([len(s) for s in sequences], input_ids=tokens, targets=tokens)
    batch = Packer(dims=ParallelDims(), max_tokens=100).pack(samples)
    parts = tuple(select(samples, torch.tensor([i])) for i in range(len(sequences)))
    return replace(batch, micro_batches=(parts,), num_tokens=1)


def bad(*micro_batches: int, rank: int = 0) -> SkippedStep:
    culprits = tuple(BadMicroBatch(data_rank=0, micro_batch=m, rank=rank, node="n1") for m in micro_batches)
    return SkippedStep(grad_norm=math.nan, culprits=culprits)


class Answers(LearnerProtocol):
    """A learner whose next optimizer step ends with a given answer."""

    def __init__(self, answer: StepResult | SkippedStep) -> None:
        self._answer = answer

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
        return {"loss": Metric(value=1.0)}

    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        return self._answer


class Kept(Answers):
    """One that keeps its batch."""

    batch: Batch

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
        self.batch = batch
        return await super().backward(batch, loss)

    async def free_step(self) -> None:
        """It has no scores."""


def made(steps: OptimizerSteps, answer: StepResult | SkippedStep) -> CompletedStep | None:
    return asyncio.run(steps.step(Answers(answer), BATCH, CrossEntropy(), 1.0, THREE_PROMPTS))


BATCH = packed((1, 2, 3, 4), (9, 9), (1, 2, 7))


def test_the_micro_batch_its_ranks_and_its_prompts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    steps = OptimizerSteps(name="policy")
    both = SkippedStep(grad_norm=math.inf, culprits=bad(0, 2).culprits + bad(0, rank=1).culprits)
    with caplog.at_level(logging.WARNING):
        assert made(steps, both) is None
        assert made(steps, bad()) is None
    assert caplog.messages == [
        "the policy's gradient norm is inf: by micro-batch 1 of data-parallel rank 0 (rank 0 on n1, 1 on n1; prompt "
        "'long'), micro-batch 3 of data-parallel rank 0 (rank 0 on n1; prompt 'short'). This optimizer step is "
        "skipped, 1 of at most 3 in a row",
        "the policy's gradient norm is nan: no micro-batch reproduces it alone: either finite gradients have a norm "
        "beyond float32, or memory or processor failed. This optimizer step is skipped, 2 of at most 3 in a row",
    ]


def test_too_many_in_a_row_end_the_run() -> None:
    steps = OptimizerSteps(name="critic")
    for _ in range(2):  # a step that is made ends the row
        for _ in range(3):
            assert made(steps, bad(1)) is None
        assert made(steps, MADE) is not None
    for _ in range(3):
        made(steps, bad(1))
    with pytest.raises(RLMegatronError, match=r"'other'\).*4 optimizer steps in a row"):
        made(steps, bad(1))


NONE = cast(Any, None)


def test_rows_of_written_text_are_named_by_their_own_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts of conversations have none, and texts that a reward model scores need not begin with a problem's."""
    prompts = [Prompt(id=f"t:{n}", text="", token_ids=(5,) if n == 3 else (), answer="") for n in range(1, 5)]

    def units_of(some: Sequence[Prompt]) -> list[Unit]:
        tokens = [np.full(3, int(one.id[-1]), np.int32) for one in some]
        return [
            (SupervisedRow(id=one.id, token_ids=ids, turns=((1, 3),)),) for one, ids in zip(some, tokens, strict=True)
        ]

    learner, steps = Kept(bad(0, 1)), OptimizerSteps(name="policy")
    packer = Packer(dims=ParallelDims(), max_tokens=2, attention_cost=0.0)
    its = DatasetJob(
        config=RunConfig.model_validate({"job": "sft", "sft": {"batch_size": 4}, "train": {"steps": 1}}),
        roles=RunComponents(learners={"policy": learner}, frozen_models={}, engine=NONE, weight_sync=NONE),
        prompts=PromptStream(prompts, seed=0),
        size=4,
        units_of=units_of,
        objective=SFTObjective(
            supervised=SupervisedSteps(learner=learner, packer=packer, optimizer_steps=steps), parts=()
        ),
        optimizer_steps=steps,
        name="",
    )
    with caplog.at_level(logging.WARNING):
        row = asyncio.run(its.step(1, Stopwatch()))
    assert (row["steps/skipped"], "loss" in row) == (1, False)
    guilty = [f"t:{int(part.input_ids[0])}" for part in learner.batch.micro_batches[0][:2]]
    assert re.findall(r"prompt ([^)]*)\)", caplog.text) == [repr(name) for name in guilty]


Started = tuple[DatasetJob | WarmStart | RLJob, OptimizerSteps]


def written(folder: Path) -> Started:
    prompts, steps = PromptStream(THREE_PROMPTS, seed=0), OptimizerSteps(name="policy")
    fields: dict[str, Any] = {"config": RunConfig(), "roles": NONE, "units_of": NONE, "objective": NONE}
    return DatasetJob(prompts=prompts, size=3, optimizer_steps=steps, name="", **fields), steps


def warm(folder: Path) -> Started:
    prompts, learner = PromptStream(THREE_PROMPTS, seed=0), cast(Any, Steps())
    steps = OptimizerSteps(name="policy")
    roles = RunComponents(learners={"policy": learner}, frozen_models={}, engine=learner, weight_sync=learner)
    supervised = SupervisedSteps(learner=learner, packer=NONE, optimizer_steps=steps)
    fields: dict[str, Any] = {"config": RunConfig(), "tokenizer": NONE, "targets": NONE, "evaluation": NONE}
    fields |= {"end_token_ids": {"": 1}, "stop_token_ids": (1,), "vocab_size": 9}
    return WarmStart(roles=roles, prompts=prompts, supervised=supervised, **fields), steps


def of_policy(folder: Path) -> Started:
    its = job(folder, [], Steps())
    return its, its.update.policy_steps


def of_critic(folder: Path) -> Started:
    its = job(folder, [], Steps())
    return its, its.update.critic_steps


@pytest.mark.parametrize("start", [written, warm, of_policy, of_critic])
def test_a_resume_goes_on_counting(start: Callable[[Path], Started], tmp_path: Path) -> None:
    """A run that is resumed after each optimizer step skips no more of them in a row than one that is not."""
    checkpoint = TypeAdapter(TrainerState)

    async def after(state: TrainerState | None) -> tuple[TrainerState, OptimizerSteps]:
        its, steps = start(tmp_path)
        if state is not None:
            await its.restore(checkpoint.validate_json(checkpoint.dump_json(replace(state, stream=None))))
        if steps.skipped_in_a_row < 3:
            assert await steps.step(Answers(bad(1)), BATCH, CrossEntropy(), 1.0, THREE_PROMPTS) is None
        return its.state(), steps

    state = None
    for count in (1, 2, 3):
        state, steps = asyncio.run(after(state))
        assert steps.skipped_in_a_row == count
    _, steps = asyncio.run(after(state))
    with pytest.raises(RLMegatronError, match=rf"the {steps.name}'s .* 4 optimizer steps in a row"):
        made(steps, bad(1))
