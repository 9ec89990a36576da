"""A stop requested before the first step, or where an evaluation is due: the resume makes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.digests import Digest
from rl_megatron.errors import Stopped
from rl_megatron.interfaces import Learner
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder, Row, Stopwatch
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.training.loop import Loop, Pace
from rl_megatron.training.tasks import uncut, unless_stopped
from tests.savings import Shards


async def never(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


async def test_work_that_nobody_wants_any_more_is_ended_first() -> None:
    stop, ended = asyncio.Event(), list[str]()
    asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(Stopped, match="before the first step"):
        await unless_stopped(stop, never(ended))
    assert ended == ["work"]


async def test_without_a_stop_it_is_the_work_and_its_error() -> None:
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless_stopped(asyncio.Event(), fails())
    assert (await unless_stopped(asyncio.Event(), asyncio.sleep(0, 7))) == 7


async def test_what_is_not_to_be_cut_ends_before_the_stop_is_told() -> None:
    stop, go, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def push() -> None:
        stop.set()
        asyncio.get_running_loop().call_later(0.01, go.set)
        await go.wait()
        ended.append("push")

    with pytest.raises(Stopped):
        await unless_stopped(stop, uncut(push()))
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

    def enough(self, row: Row) -> bool:
        return float(row.get("eval/accuracy") or 0) >= self.least

    async def before_save(self, stop: asyncio.Event) -> None:
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
        recorder = Recorder(folder, LogSection(tensorboard=False), Progress(6, mode="plain"))
        loop = Loop(
            job=cast(Any, job),
            pace=Pace(steps=6, rows=1, evaluations=2, checkpoints=2),
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
        except Stopped:
            return None, job.evaluated
        finally:
            recorder.close()

    return asyncio.run(main())


def recorded(folder: Path) -> tuple[list[dict[str, Any]], dict[str, tuple[float | None, str]]]:
    """The rows, without what they took, but with its names, and the accuracies of the checkpoints that are kept, with
    what they were measured by."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [
        {name: None if "seconds" in name else value for name, value in row.items() if "checkpoint" not in name}
        for row in rows
    ]
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
def test_a_job_that_has_what_it_is_for_before_its_first_step_makes_none(
    tmp_path: Path, least: float, evaluated: list[int]
) -> None:
    assert run(tmp_path, "never", saved=False, least=least) == (True, evaluated)
    assert [row["step"] for row in recorded(tmp_path)[0]] == [*range(evaluated[-1] + 1)]
