"""Steps with fewer groups than requested, without any, or without a token in the loss; a stop before any; an end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, get_ident
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

import pytest

from rl_megatron.config.run import RunConfig
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.environments.protocol import EnvironmentStep, Reply
from rl_megatron.environments.registry import EnvironmentMaker
from rl_megatron.errors import DataError, Stopped
from rl_megatron.interfaces import Roles
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.rollout import stream as stream_module
from rl_megatron.rollout.batch import Answered, Drawn, Ledger, Reason
from rl_megatron.rollout.sampler import SamplerBySource
from rl_megatron.training.checkpoints import CheckpointStore
from rl_megatron.training.evaluation import Evaluation
from rl_megatron.training.jobs.rl import Reinforcement, stream_of
from rl_megatron.training.loop import Loop, Pace
from rl_megatron.training.update import Update
from rl_megatron.types import Counts, Metric, RolloutGroup, StepResult, Turn
from tests.completions import drawn, finished
from tests.scripted_engine import Scripted, sampler
from tests.unit.rollout.test_environment_source import PROMPTS, Talks
from tests.unit.training.test_engine_logprobs import Learner, groups

WANTED = 4  # groups of a step


@pytest.fixture(autouse=True)
def _few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_MAX_BATCHES", 2)


TEACHES = groups()[0]
EQUAL = replace(TEACHES, trajectories=tuple(replace(one, reward=1.0) for one in TEACHES.trajectories))


@dataclass
class Source:
    """Gives the answers that it was given, one for each prompt."""

    answers: Iterator[Answered]

    async def groups(self, drawn: Sequence[Drawn]) -> list[Answered]:
        return [next(self.answers) for _ in drawn]

    async def interrupt(self) -> None:
        raise AssertionError

    def so_far(self, drawn: Drawn) -> tuple[()]:
        return ()


class Steps(Learner):
    """A learner that counts its optimizer steps, and weights that are pushed."""

    taken = 0

    async def backward(self, *_: object) -> dict[str, Metric[float | Counts]]:
        return {"loss": Metric(value=0.5)}

    async def step(self, learning_rate: float) -> StepResult:
        self.taken += 1
        return StepResult(grad_norm=0.0)

    async def push(self, version: int) -> Any:
        return SimpleNamespace(num_bytes=0, verify_seconds=0.0, quantization_error=None)


def job(folder: Path, answers: Sequence[Answered], learner: Any, **sections: dict[str, Any]) -> Reinforcement:
    rollout = {"prompts_per_step": WANTED, **sections.pop("rollout", {})}
    given = {"train": {"minibatches": 1}, "log": {"tensorboard": False}, "rollout": rollout, **sections}
    config = RunConfig.model_validate(given)
    roles = Roles(learners={"policy": learner}, frozen={}, engine=learner, weights=learner)
    prompts = PromptStream([TEACHES.prompt] * 8, seed=0)
    return Reinforcement(
        config=config,
        roles=roles,
        stream=stream_of(config, prompts, Source(iter(answers)), Ledger(folder / "ledger.jsonl")),
        prompts=prompts,
        evaluation=Evaluation(sampler=sampler(Scripted(str)), sets=(), section=config.eval, last_step=0),
        update=Update(config=config, roles=roles, attention_cost=0.0),
        start_folder=folder,
        recorder=Recorder(folder, config.log, Progress(1, "plain", "run", run_folder=folder)),
        route="shared_file",
    )


def step(folder: Path, answers: Sequence[Answered], **sections: dict[str, Any]) -> tuple[Row, int]:
    """A step's row, written as the run writes it, and how many optimizer steps it took."""
    learner = Steps()

    async def once() -> Row:
        it = job(folder, answers, learner, **sections)
        row = await it.step(1, Stopwatch())
        await it.recorder.write(row)
        return row

    return asyncio.run(once()), learner.taken


def answers(*groups: RolloutGroup) -> list[Answered]:
    return [Answered(group=group, rewards=group.rewards) for group in groups]


def test_a_step_trains_on_the_groups_that_teach_though_fewer_than_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize("mode", ["refill", "drop"])
def test_a_step_without_a_group_that_teaches_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Literal["refill", "drop"]
) -> None:
    """At a pass rate of 0 or 1 a run of days goes on: the next prompts may teach."""
    row, taken = step(tmp_path, answers(*[EQUAL] * 8), rollout={"dynamic_sampling": mode})
    assert (row["groups/trained"], row["groups/filtered"], row["tokens/train"], taken) == (0, 8, 0, 0)
    assert row["tokens/rollout"] == 8 * sum(one.num_sampled for one in EQUAL.trajectories)
    assert "step 1 has no token to train on and is skipped" in caplog.text


def test_the_reason_of_groups_without_own_advantages_is_not_their_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    failed = [Answered(group=None, reason="reward_error")] * 4 * tries
    with pytest.raises(
        DataError, match=rf"left out \(log.txt names those that failed\): {4 * tries} for failed rewards\. Fix these"
    ):
        step(tmp_path, failed, rollout={"dynamic_sampling": mode})


def test_what_left_a_step_without_a_group_is_named(tmp_path: Path) -> None:
    reasons: list[Reason] = ["environment_error", "nothing_sampled", "environment_error", "poison"]
    failed = [Answered(group=None, reason=one, problem=f"problem {i}") for i, one in enumerate(reasons)]
    with pytest.raises(
        DataError,
        match=r"1 for servers that ended .*, 2 for failed traj.*, 1 for traj.*; the first of them: problem 0$",
    ):
        step(tmp_path, failed)


def test_a_step_that_poison_alone_empties_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step of one prompt: servers that end under more than one, and than 1 % of all, end the run by themselves."""
    poison = [Answered(group=None, reason="poison")]
    row, taken = step(tmp_path, poison, rollout={"prompts_per_step": 1})
    assert (row["groups/trained"], row["groups/dropped"], taken) == (0, 1, 0)
    assert "1 for servers that ended under them" in caplog.text


def test_a_batch_whose_every_completion_is_left_out_moves_no_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = finished(TEACHES, ["length"] * len(TEACHES.trajectories))
    algorithm = {"drop_truncated": True}
    row, taken = step(tmp_path, answers(cut, cut, cut, cut), algorithm=algorithm)
    assert (row["tokens/train"], taken) == (0, 0)
    assert not {name for name, value in row.items() if value != value}  # no mean over nothing
    assert "step 1 has no token to train on" in caplog.text


def test_a_minibatch_whose_every_completion_is_left_out_takes_no_step(tmp_path: Path) -> None:
    """One sequence a minibatch; those that were cut short have no gradient, but Adam's momentum would move weights."""
    cut = finished(TEACHES, ["length", "stop", "length", "stop"])
    algorithm = {"drop_truncated": True}
    _, taken = step(
        tmp_path, answers(cut), algorithm=algorithm, train={"minibatches": 4}, rollout={"prompts_per_step": 1}
    )
    assert taken == 2


async def test_a_stop_before_the_first_step_waits_for_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """It is asked while the run evaluates, which may take long."""

    class Evaluates:
        async def row(self, *_: object) -> Row:
            it.stop.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def closed(self) -> None:
            """Nothing is released."""

    of = job(tmp_path, [], Steps(), warm_start={"steps": 0})
    of.evaluation = cast(Any, Evaluates())
    pace = Pace(steps=1, rows=1, evaluations=1, checkpoints=1)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, config={})
    it = Loop(job=of, pace=pace, checkpoints=store, recorder=of.recorder, stop=asyncio.Event())
    with pytest.raises(Stopped, match="before the first step"):
        await it.run()
    assert not list(tmp_path.iterdir())
    assert it.saved is None


async def test_an_end_waits_until_environments_that_failed_are_closed(tmp_path: Path) -> None:
    go, closed = Event(), list[int]()

    class Fails(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            raise ValueError("no")

        async def close(self) -> None:
            await asyncio.to_thread(go.wait)
            closed.append(1)

    of = job(tmp_path, [], Steps())
    trains, own = (sampler(Scripted(lambda _: "a"), EnvironmentMaker(Fails), on_error="drop") for _ in range(2))
    both = SamplerBySource(
        engine=trains.engine, rollout=trains.rollout, stop_token_ids=(), seed=0, usual=trains, own={}
    )
    of.evaluation = replace(of.evaluation, sampler=both, own={"set": own})
    for one in (both.over(trains.engine), own):
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

    it = job(tmp_path, answers(*[group] * WANTED), Steps(), log={"tensorboard": False, "samples_per_step": 0})
    it.update = cast(Any, trains)
    row, loop = await it.step(1, Stopwatch()), get_ident()
    assert row["tokens/rollout"] == WANTED * sum(one.num_sampled for one in TEACHES.trajectories)
    assert Noted.visitors
    assert loop not in Noted.visitors
