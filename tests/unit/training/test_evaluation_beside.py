"""An evaluation that goes on while later steps train: its row, and what failures, saves and resumes make of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.servers.engines import SERVERS
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.evaluation.sets import ProblemSet
from rl_megatron.observability.history import load_runs
from rl_megatron.observability.metrics.writer import MetricsWriter
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.rollout.policy_sampler import LAST, BesideTraining, PolicySampler
from rl_megatron.rollout.sampler import SamplerBySource
from rl_megatron.training.evaluation import Evaluation, EvaluationBeside
from rl_megatron.types import Completion, GenerationRequest, Prompt, Span
from tests.completions import completion
from tests.scripted_engine import Scripted, sampler
from tests.unit.rollout.test_engine_routes import ASKED
from tests.unit.rollout.test_environment_source import PROMPTS, calculates
from tests.unit.rollout.test_running_requests import MOE, Asked


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


def beside(folder: Path, source: PolicySampler, prompts: Sequence[Prompt] = PROMPTS) -> EvaluationBeside:
    problems = ProblemSet(name=None, prompts=prompts, section=EvalSetSection(), temperature=0.0)
    evaluation = Evaluation(sampler=source, sets=[problems], section=EvalSection(every=3), last_step=99)
    recorder = Recorder(folder, LogSection(tensorboard=False), Progress(9, mode="plain"))
    return EvaluationBeside(evaluation=evaluation, recorder=recorder)


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_row_is_written_when_it_ends_and_what_is_due_meanwhile_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = Waits()
        ours = beside(tmp_path, sampler(engine))
        ours.begin(3)
        ours.begin(6)  # it would want version 6, and 3 is under way
        await ours.finish(3)  # nothing of an earlier step
        assert rows(tmp_path) == []
        engine.go.set()
        await ours.finish(4)
        assert [(row["step"], row["eval/skipped"]) for row in rows(tmp_path)] == [(3, 1)]
        ours.begin(9)
        await ours.finish(10)
    assert "step 6 is not evaluated: the evaluation of step 3 is under way; raise eval.every" in caplog.text
    first, second = rows(tmp_path)
    assert (first["phase"], first["eval/accuracy"], second["step"], second["eval/skipped"]) == ("eval", 1.0, 9, 0)
    # ?3*4 and !12, ?12*11 and !132, each with its end, whose last token is of version 4 in the second turns
    assert first["eval/own_version_fraction"] == pytest.approx((5 + 3 + 7 + 4) / (5 + 4 + 7 + 5))
    assert second["eval/own_version_fraction"] == 0.0


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
        source = SamplerBySource(
            engine=training,
            rollout=one.rollout,
            stop_token_ids=one.stop_token_ids,
            seed=0,
            usual=one,
            own={"tool": sampler(training)},
        )
        training.go.set()
        ours = beside(tmp_path, source, [PROMPTS[0], replace(PROMPTS[1], source="tool")])
        ours.begin(3)
        await ours.finish(4)
        assert len(training.asked) == 4
        assert {request.birth for request in training.asked} == {LAST}


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

        def so_far(self, request_id: str) -> Completion | None:
            return completion([int(request_id)])

        async def interrupt(self) -> None:
            self.told += 1

    engine = Counts(calculates)
    few = BesideTraining(engine, 3)
    assert (begun := few.so_far("5")) is not None
    assert begun.token_ids.tolist() == [5]
    await few.interrupt()
    params = sampler(engine).params(temperature=1.0)
    asked = [GenerationRequest(id=f"{n}", token_ids=(1,), num_completions=1, params=params) for n in range(20)]
    answers = await asyncio.gather(*map(few.generate, asked), return_exceptions=True)
    assert isinstance(answers.pop(9), EngineError)  # it keeps no place
    assert [one.token_ids.tolist() for (one,) in answers] == [[n] for n in range(20) if n != 9]
    assert (engine.most, engine.now, engine.told) == (3, 0, 1)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_engines_take_its_requests_behind_training_and_those_that_training_waits_for_first(
    kind: str, tmp_path: Path
) -> None:
    engine, server, adapter = Waits(), Asked(), SERVERS[kind](MOE)
    server.priorities = True
    engine.go.set()
    ours = beside(tmp_path, sampler(engine))
    ours.begin(3)
    await ours.finish(4)
    behind, engine.asked = engine.asked, []
    await ours.evaluation.row(6)
    for request in (*behind, replace(ASKED, birth=1_000_000), *engine.asked):
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
async def test_a_resume_keeps_the_evaluation_of_its_step_and_makes_it_no_second_time(
    tmp_path: Path, phase: str
) -> None:
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
    assert [row.get("eval/accuracy") for row in run.rl] == [None, 0.5, None]
    assert not any("seconds/eval" in row for row in run.rl)  # it is no part of that step's seconds


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ([], "rollout.engine=local samples in the learner's processes, which train meanwhile"),
        (["rollout=vllm", "rollout.server.colocated=true"], "eval.mode=beside with rollout.server.colocated=true"),
        (["rollout.server.replicas=1", "eval.every=0"], "eval.every=0: nothing is evaluated between"),
        (
            ["rollout.server.replicas=1", "eval.at_once=4", "environment.function=calculator"],
            "eval.at_once=4 with environment.function=calculator: a turn that waits",
        ),
        (["rollout.server.replicas=1", "checkpoint.keep_best=1"], "keep_best=1 with eval.mode=beside: a checkpoint is"),
    ],
)
def test_where_it_would_do_nothing_it_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["eval.mode=beside", *keys])
    with pytest.raises(ConfigError, match=r"at_once=4 is for eval\.mode=beside, but this is blocking"):
        load_config("tiny_cpu", ["eval.at_once=4"])
    load_config("tiny_cpu", ["eval.mode=beside", "rollout.server.replicas=1"])
