"""Runs that stop or fail while a checkpoint is written or an evaluation runs, and what their resumes make."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from launcher.servers.engines import SERVERS
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.digests import Digest, SaveDigests
from rl_megatron.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    StopRequested,
    WorkerFailure,
    wait_or_stop,
)
from rl_megatron.evaluation.sets import EvalSet
from rl_megatron.interfaces import Learner
from rl_megatron.observability.history import load_runs
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import MetricsWriter, Recorder, Row, Stopwatch
from rl_megatron.rollout.policy_sampler import LOWEST_PRIORITY, LowPriorityEngine, PolicySampler
from rl_megatron.rollout.sampler import SourceSampler
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.training.evaluation import BackgroundEvaluator, Evaluator
from rl_megatron.training.jobs.warm_start import shielded
from rl_megatron.training.loop import Intervals, Loop
from rl_megatron.types import Completion, GenerationRequest, Prompt, Span
from tests.completions import completion
from tests.savings import Ended, Failing, Shards
from tests.scripted_engine import Scripted, sampler
from tests.unit.rollout.test_engine_routes import ASKED
from tests.unit.rollout.test_engine_servers import MOE, Asked
from tests.unit.rollout.test_environment_source import PROMPTS, calculates


async def never(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


async def test_work_that_nobody_wants_any_more_is_ended_first() -> None:
    stop, ended = asyncio.Event(), list[str]()
    asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(StopRequested, match="before the first step"):
        await wait_or_stop(stop, never(ended))
    assert ended == ["work"]


async def test_without_a_stop_it_is_the_work_and_its_error() -> None:
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await wait_or_stop(asyncio.Event(), fails())
    assert (await wait_or_stop(asyncio.Event(), asyncio.sleep(0, 7))) == 7


async def test_what_is_not_to_be_cut_ends_before_the_stop_is_told() -> None:
    stop, go, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def push() -> None:
        stop.set()
        asyncio.get_running_loop().call_later(0.01, go.set)
        await go.wait()
        ended.append("push")

    with pytest.raises(StopRequested):
        await wait_or_stop(stop, shielded(push()))
    assert ended == ["push"]


class Loads(Shards):
    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """Nothing depends on them."""


@dataclass
class Steps:
    """A job of which ``stop`` is set at the moment ``at``, as in "evaluate 4"; accuracy falls. An evaluation under way
    at a stop lasts for ever."""

    stop: asyncio.Event
    at: str
    first_step_is_saved: bool
    least: float  # accuracy with which it has what it is for
    name: str = "steps"
    number: int = 0
    evaluated: list[int] = field(default_factory=list)

    def moment(self, what: str) -> None:
        if self.at == f"{what} {self.number}":
            self.stop.set()

    async def start(self, *, fresh: bool) -> Row | None:
        self.moment("start")
        return {"step": 0, "phase": "rl"} if fresh else None

    async def step(self, number: int, watch: Stopwatch) -> Row:
        self.number = number
        self.moment("step")
        return {"step": number, "phase": "rl", "loss": 1 / number}

    async def evaluate(self, watch: Stopwatch) -> Row:
        self.moment("evaluate")
        if self.stop.is_set() and self.number < 6:
            await asyncio.Event().wait()
        self.evaluated.append(self.number)
        with watch("eval"):
            return {"eval/accuracy": 1 - self.number / 10}

    def should_stop(self, row: Row) -> bool:
        return float(row.get("eval/accuracy") or 0) >= self.least

    async def flush(self, stop: asyncio.Event) -> None:
        """Nothing is under way."""

    def state(self) -> TrainerState:
        return TrainerState(step=self.number, prompts={"epoch": 0, "next": 8}, stream=None)

    def learners(self) -> dict[str, Learner]:
        return {"learner": cast(Learner, Loads())}

    async def restore(self, state: TrainerState) -> None:
        self.number = state.step

    async def close(self) -> None:
        """Nothing goes on."""


def run(folder: Path, at: str, *, saved: bool = True, least: float = 2.0) -> tuple[bool | None, list[int]]:
    """Whether the job made its six steps (None: stopped before the next), and the steps that it evaluated."""

    async def main() -> tuple[bool | None, list[int]]:
        stop = asyncio.Event()
        job = Steps(stop, at, saved, least)
        folder.mkdir(exist_ok=True)
        recorder = Recorder(folder, LogSection(), Progress(6, mode="plain"))
        loop = Loop(
            job=cast(Any, job),
            pace=Intervals(steps=6, metrics=1, evaluations=2, checkpoints=2),
            checkpoints=CheckpointStore(folder / "checkpoints", keep=1, keep_best=2, config={}, measured_by="sums"),
            recorder=recorder,
            stop=stop,
        )
        newest = checkpoints.latest(folder / "checkpoints")
        if newest is not None:
            start = checkpoints.read(newest)
            recorder.truncate_after(start.state.step)
            await loop.restore(start, start.state.step)
        try:
            async with asyncio.timeout(30):
                return await loop.run(), job.evaluated
        except StopRequested:
            return None, job.evaluated
        finally:
            recorder.close()

    return asyncio.run(main())


def recorded(folder: Path) -> tuple[list[dict[str, Any]], dict[str, tuple[float | None, str]]]:
    """The rows, without what they took, but with its names, and the accuracies of the checkpoints that are kept, with
    what they were measured by."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [{n: None if "seconds" in n else v for n, v in row.items() if "checkpoint" not in n} for row in rows]
    kept = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("checkpoints/*/manifest.json")}
    return numbers, {name: (one["accuracy"], one["measured_by"]) for name, one in kept.items()}


@pytest.mark.parametrize("at", ["step 2", "evaluate 2"])
def test_a_stop_waits_for_no_evaluation_and_its_resume_makes_it(tmp_path: Path, at: str) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(whole, "never") == (True, [0, 2, 4, 6])
    assert run(stopped, at) == (False, [0])
    rows, _ = recorded(stopped)
    assert [(row["step"], row.get("eval/accuracy")) for row in rows] == [(0, 1.0), (1, None), (2, None)]
    for again in ("start 2", "evaluate 2"):  # before it could be made
        assert run(stopped, again) == (None, [])
        assert recorded(stopped)[0] == rows
    assert run(stopped, "never") == (True, [2, 4, 6])
    assert recorded(stopped) == recorded(whole)
    assert set(recorded(stopped)[1]) == {"step_000000", "step_000002", "step_000006"}  # the warm start's, the best, too


@pytest.mark.parametrize("at", ["start 0", "evaluate 0"])
def test_a_stop_after_a_warm_start_saves_it_without_the_evaluation_of_step_0(tmp_path: Path, at: str) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(whole, "never")
    assert run(stopped, at) == (None, [])
    assert [path.name for path in stopped.glob("checkpoints/*")] == ["step_000000"]
    assert run(stopped, "never") == (True, [0, 2, 4, 6])
    assert recorded(stopped) == recorded(whole)


def test_the_last_steps_evaluation_is_made_at_a_stop_too(tmp_path: Path) -> None:
    assert run(tmp_path, "step 6", saved=False) == (True, [0, 2, 4, 6])


@pytest.mark.parametrize(("least", "evaluated"), [(1.0, [0]), (1.1, [0, 2, 4, 6])])
def test_a_job_done_before_its_first_step_makes_none(tmp_path: Path, least: float, evaluated: list[int]) -> None:
    assert run(tmp_path, "never", saved=False, least=least) == (True, evaluated)
    assert [row["step"] for row in recorded(tmp_path)[0]] == [*range(evaluated[-1] + 1)]


# Runs that fail while a checkpoint is being written: which of them leave it, and whose error they end with.
class Writing(Shards):
    """A learner whose ranks still write when its steps are made: only who waits for them finds everything written."""

    def __init__(self, problem: Exception | None = None) -> None:
        super().__init__()
        self.problem, self.asked = problem, 0

    async def save(self, folder: Path) -> Ended:
        done, outer = await super().save(folder), self

        class Later(Ended):
            async def is_written(self, *, wait: bool = False) -> bool:
                return wait

            async def finalize(self) -> SaveDigests:
                outer.asked += 1
                if outer.problem is not None:
                    raise outer.problem
                return await super().finalize()

        return Later(done.files)


def loop_of(job: Failing, folder: Path) -> Loop:
    return Loop(
        job=cast(Any, job),
        pace=Intervals(steps=9, metrics=1, evaluations=0, checkpoints=1),
        checkpoints=CheckpointStore(folder, keep=2, config={}),
        recorder=cast(Any, SimpleNamespace(write=AsyncMock(return_value=None))),
        stop=asyncio.Event(),
    )


def test_a_warm_start_is_on_the_disk_before_a_step_of_reinforcement(tmp_path: Path) -> None:
    job = Failing({1: WorkerFailure("rank 1")}, first_step_is_saved=True)
    with pytest.raises(WorkerFailure, match="rank 1"):
        asyncio.run(loop_of(job, tmp_path).run())
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000000"
    assert checkpoints.read(tmp_path / "step_000000").state.step == 0


def test_a_fault_outside_of_the_ranks_leaves_the_checkpoint_in_hand(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 7"):
        asyncio.run(loop_of(Failing({2: DataError("line 7")}, shards=Writing()), tmp_path).run())
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000001"
    assert checkpoints.read(tmp_path / "step_000001").state.step == 1


async def test_a_cancelled_run_leaves_the_begun_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = asyncio.Event()  # step 2
    running = asyncio.create_task(loop_of(Failing({}, until={2: begun.set}, shards=Writing()), tmp_path).run())
    await begun.wait()
    running.cancel("another task failed")
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        await running
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000001"
    assert "another task failed); its checkpoint in hand is finished first" in caplog.text


def test_a_second_ctrl_c_waits_for_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What its signal raises ends the event loop, and asyncio then cancels every task."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    learner = Writing()
    job = Failing({}, until={2: lambda: asyncio.get_running_loop().call_soon(interrupt) and False}, shards=learner)
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        asyncio.run(loop_of(job, tmp_path).run())
    assert (checkpoints.latest(tmp_path), learner.asked) == (None, 0)
    assert "in hand" not in caplog.text


def test_ranks_that_failed_are_not_waited_for(tmp_path: Path) -> None:
    learner = Writing()
    with pytest.raises(WorkerFailure, match="rank 1"):
        asyncio.run(loop_of(Failing({2: WorkerFailure("rank 1")}, shards=learner), tmp_path).run())
    assert (checkpoints.latest(tmp_path), learner.asked) == (None, 0)


def test_a_save_that_fails_hides_no_error_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = Writing(CheckpointError("the disk is full"))
    with caplog.at_level(logging.ERROR), pytest.raises(DataError, match="line 7"):
        asyncio.run(loop_of(Failing({2: DataError("line 7")}, shards=learner), tmp_path).run())
    said = f"{tmp_path}/step_000001 is not finished: CheckpointError: the disk is full"
    assert f"the run fails (DataError: line 7); besides, {said}" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_save_that_failed_is_asked_once(tmp_path: Path) -> None:
    learner = Writing(CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="the disk is full"):  # step 2's save waits for step 1's
        asyncio.run(loop_of(Failing({}, shards=learner), tmp_path).run())
    assert learner.asked == 1
    assert list(tmp_path.iterdir()) == []  # on a full disk, what is left would keep it full


@pytest.mark.parametrize("name", ["trainer.json", "manifest.json"])
def test_a_full_disk_is_told_with_the_file_and_keeps_nothing_of_the_save(tmp_path: Path, name: str) -> None:
    class Full(Shards):
        async def save(self, folder: Path) -> Ended:
            (folder.parent / name).symlink_to("/dev/full")
            return await super().save(folder)

    with pytest.raises(OSError, match=rf"No space left on device: '.*step_000001/{name}'"):
        asyncio.run(loop_of(Failing({}, shards=Full()), tmp_path).run())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [WorkerFailure("rank 1"), asyncio.CancelledError()])
async def test_publishing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    go, thread, publish = threading.Event(), threading.Event(), checkpoints.publish_folder

    def when_told(work: Path, final: Path) -> None:
        thread.set()
        assert go.wait(30)
        publish(work, final)

    monkeypatch.setattr(checkpoints, "publish_folder", when_told)

    def told() -> bool:
        """Whether a thread publishes step 2, which goes on after this step."""
        if thread.is_set():
            asyncio.get_running_loop().call_soon(go.set)
        return thread.is_set()

    loop = loop_of(Failing({4: error}, until={4: told}), tmp_path)
    loop.pace = replace(loop.pace, checkpoints=2)
    try:
        with pytest.raises(type(error)):
            await loop.run()
        assert checkpoints.latest(tmp_path) == tmp_path / "step_000002"
    finally:
        go.set()


def test_a_checkpoint_has_its_name_while_the_next_step_lasts(tmp_path: Path) -> None:
    job = Failing({2: WorkerFailure("rank 1")}, until={2: lambda: checkpoints.latest(tmp_path)})
    with pytest.raises(WorkerFailure, match="rank 1"):
        asyncio.run(loop_of(job, tmp_path).run())
    assert checkpoints.read(tmp_path / "step_000001").state.step == 1


def test_a_save_that_failed_ends_the_run_with_the_next_step(tmp_path: Path) -> None:
    class Full(Shards):
        asked = 0

        async def save(self, folder: Path) -> Ended:
            outer = self

            class Failed(Ended):
                async def finalize(self) -> SaveDigests:
                    outer.asked += 1
                    raise CheckpointError("the disk is full")

            return Failed({})

    job = Failing(
        {}, shards=(full := Full()), until={3: lambda: loop.pending_save is None or loop.pending_save._saved.done()}
    )
    loop = loop_of(job, tmp_path)
    loop.pace = replace(loop.pace, checkpoints=2)
    with pytest.raises(CheckpointError, match="the disk is full"):
        asyncio.run(loop.run())
    assert (job.done, full.asked) == (3, 1)


# An evaluation that goes on while later steps train: its row, and what failures, saves and resumes make of it.
class Waits(Scripted):
    """Answers once ``go`` is set; ``fails`` then."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(calculates)
        self.go, self.fails = asyncio.Event(), fails

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        await self.go.wait()
        if self.fails:
            raise EngineError("no server is left")
        (one,) = await super().generate(request)
        spans = (Span(0, 3),) if "turn 0" in request.id else (Span(0, 3), Span(len(one.token_ids) - 1, 4))
        return [Completion(token_ids=one.token_ids, logprobs=one.logprobs, finish_reason="stop", spans=spans)]


def beside(folder: Path, source: PolicySampler, prompts: Sequence[Prompt] = PROMPTS) -> BackgroundEvaluator:
    problems = EvalSet(name=None, prompts=prompts, section=EvalSetSection(), temperature=0.0)
    evaluation = Evaluator(sampler=source, sets=[problems], section=EvalSection(every=3), last_step=99)
    recorder = Recorder(folder, LogSection(), Progress(9, mode="plain"))
    return BackgroundEvaluator(evaluation=evaluation, recorder=recorder)


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_row_is_written_at_its_end_and_others_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = Waits()
        ours = beside(tmp_path, sampler(engine))
        ours.begin(3)
        ours.begin(6)  # it would want version 6, and 3 is under way
        await ours.finish(3)  # nothing of an earlier step
        assert rows(tmp_path) == []
        engine.go.set()
        await ours.finish(4)
        assert [row["step"] for row in rows(tmp_path)] == [3]
        ours.begin(9)
        await ours.finish(10)
    assert "step 6 is not evaluated: the evaluation of step 3 is under way; raise eval.every" in caplog.text
    first, second = rows(tmp_path)
    assert (first["phase"], first["eval/accuracy"], second["step"]) == ("eval", 1.0, 9)
    # ?3*4 and !12, ?12*11 and !132, each with its end, whose last token is of version 4 in the second turns
    assert first["eval/current_version_fraction"] == pytest.approx((5 + 3 + 7 + 4) / (5 + 4 + 7 + 5))
    assert second["eval/current_version_fraction"] == 0.0


async def test_what_it_raises_is_raised_in_the_next_step_and_once(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        engine = Waits(fails=True)
        ours = beside(tmp_path, sampler(engine))
        ours.begin(3)
        engine.go.set()
        with pytest.raises(EngineError, match="no server is left"):
            await ours.finish(4)
        ours.check()
    assert rows(tmp_path) == []


async def test_sources_with_an_environment_of_their_own_are_sampled_where_the_others_are(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        training = Waits()
        one = sampler(training)
        others: Any = {
            "stop_token_ids": one.stop_token_ids,
            "default": one,
            "source_samplers": {"tool": sampler(training)},
        }
        source = SourceSampler(engine=training, rollout=one.rollout, seed=0, **others)
        training.go.set()
        ours = beside(tmp_path, source, [PROMPTS[0], replace(PROMPTS[1], source="tool")])
        ours.begin(3)
        await ours.finish(4)
        assert len(training.asked) == 4
        assert {request.start_version for request in training.asked} == {LOWEST_PRIORITY}


async def test_few_requests_are_under_way_at_once_and_each_is_answered() -> None:
    class Counts(Scripted):
        now, most, told = 0, 0, 0

        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            self.now, self.most = self.now + 1, max(self.most, self.now + 1)
            await asyncio.sleep(0)
            self.now -= 1
            if request.id == "9":
                raise EngineError("no server is left")
            return [completion([int(request.id)])]

        def partial_completion(self, request_id: str) -> Completion | None:
            return completion([int(request_id)])

        async def collect_partials(self) -> None:
            self.told += 1

    engine = Counts(calculates)
    few = LowPriorityEngine(engine, 3)
    assert (begun := few.partial_completion("5")) is not None
    assert begun.token_ids.tolist() == [5]
    await few.collect_partials()
    params = sampler(engine).params(temperature=1.0)
    asked = [GenerationRequest(id=f"{n}", token_ids=(1,), num_completions=1, params=params) for n in range(20)]
    answers = await asyncio.gather(*map(few.generate, asked), return_exceptions=True)
    assert isinstance(answers.pop(9), EngineError)  # it keeps no place
    assert [one.token_ids.tolist() for (one,) in answers] == [[n] for n in range(20) if n != 9]
    assert (engine.most, engine.now, engine.told) == (3, 0, 1)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_engines_take_its_requests_last_and_those_waited_for_first(kind: str, tmp_path: Path) -> None:
    engine, server, adapter = Waits(), Asked(), SERVERS[kind](MOE)
    server.priorities = True
    engine.go.set()
    ours = beside(tmp_path, sampler(engine))
    ours.begin(3)
    await ours.finish(4)
    behind, engine.asked = engine.asked, []
    await ours.evaluation.row(6)
    for request in (*behind, replace(ASKED, start_version=1_000_000), *engine.asked):
        await adapter.generate(server, request, "id")
    assert len(behind) == len(engine.asked) == 4
    sign = {"vllm": 1, "sglang": -1}[kind]  # SGLang's highest goes first
    priorities = [sign * body["priority"] for _, body in server.asked]
    assert min(priorities[:4]) > priorities[4] == 1_000_000
    assert max(priorities[:4]) < 2**31  # engines that sort them may keep 32 bits
    assert priorities[5:] == [0] * 4


async def test_a_close_leaves_nothing_under_way(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        ours = beside(tmp_path, sampler(Waits()))
        ours.begin(3)
        await asyncio.sleep(0)
        await ours.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("evaluation")]


async def test_a_stop_gives_it_up_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(30):
            stop, ours = asyncio.Event(), beside(tmp_path, sampler(Waits()))
            ours.begin(3)
            asyncio.get_running_loop().call_soon(stop.set)
            await ours.finish(4, stop)
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("evaluation")]
    assert "step 3 is not evaluated: its evaluation was under way when the run stopped" in caplog.text


async def test_one_that_a_resume_began_is_not_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(30):
        engine = Waits()
        ours = beside(tmp_path, sampler(engine))
        ours.begin(3)
        ours.begin(3)
        engine.go.set()
        await ours.finish(4)
        ours.begin(3)
    assert [row["step"] for row in rows(tmp_path)] == [3]
    assert "not evaluated" not in caplog.text


@pytest.mark.parametrize("phase", ["rl", "eval"])
async def test_a_resume_keeps_the_evaluation_of_its_step_and_repeats_none(tmp_path: Path, phase: str) -> None:
    """Whether it was made beside later steps, whose rows may come before, or before training went on."""
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 3, "phase": "rl", **({"eval/accuracy": 0.25} if phase == "rl" else {})})
    writer.write({"step": 4, "phase": "rl"})
    if phase == "eval":
        writer.write({"step": 3, "phase": "eval", "eval/accuracy": 0.25})
    writer.truncate_after(3)
    async with asyncio.timeout(30):
        engine = Waits()
        engine.go.set()
        ours = beside(tmp_path, sampler(engine))
        ours.begin(3)
        await ours.finish(4)
        ours.begin(6)
        await ours.finish(7)
    found = [(row["step"], row["eval/accuracy"]) for row in rows(tmp_path) if "eval/accuracy" in row]
    assert found == [(3, 0.25), (6, 1.0)]


def test_a_resume_keeps_evaluations_up_to_its_step(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step, phase in ((1, "rl"), (2, "rl"), (1, "eval"), (3, "rl"), (2, "eval"), (3, "eval")):
        writer.write({"step": step, "phase": phase, "eval/accuracy": step / 10})
    assert writer.truncate_after(2) == 2
    assert [(row["step"], row["phase"]) for row in rows(tmp_path)] == [(1, "rl"), (2, "rl"), (1, "eval"), (2, "eval")]
    assert [writer.has_evaluation(step) for step in (1, 2, 3)] == [True, True, False]
    writer.write({"step": 2, "phase": "rl", "loss": 1.0}, again=True)
    assert [row["phase"] for row in rows(tmp_path)] == ["rl", "eval", "eval", "rl"]


def test_reports_show_it_at_its_step(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write({"step": step, "phase": "rl", "seconds/step": 2.0})
    writer.write({"step": 2, "phase": "eval", "eval/accuracy": 0.5, "seconds/eval": 3.0})
    (tmp_path / "config.yaml").write_text("run: {name: a}\n")
    (run,) = load_runs([tmp_path])
    assert [row.get("eval/accuracy") for row in run.rl.rows("eval/accuracy")] == [None, 0.5, None]
    assert "seconds/eval" not in run.rl.names  # it is no part of that step's seconds


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ([], "rollout.engine=local: this engine samples in the learner's processes, which train at the same"),
        (["rollout=vllm", "rollout.server.colocated=true"], "eval.mode=background with .*server.colocated=true"),
        (["rollout.server.replicas=1", "eval.every=0"], "eval.every=0 .*: nothing is evaluated between"),
        (
            ["rollout.server.replicas=1", "eval.at_once=4", "environment.function=calculator"],
            "eval.at_once=4 and environment.function=calculator: the wait of a turn",
        ),
        (["rollout.server.replicas=1", "checkpoint.keep_best=1"], "keep_best=1 with .*eval.mode=background: a check"),
    ],
)
def test_where_it_would_do_nothing_it_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["eval.mode=background", *keys])
    with pytest.raises(ConfigError, match=r"at_once=4 with eval\.mode=blocking: only evaluations in the backgr"):
        load_config("tiny_cpu", ["eval.at_once=4"])
    load_config("tiny_cpu", ["eval.mode=background", "rollout.server.replicas=1"])
