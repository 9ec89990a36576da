"""What a job on written text says of the passes over each source of a mixture."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import pytest

from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.jobs.written import WrittenJob
from rl_megatron.types import Prompt
from tests.unit.training.test_long_rows import job

SIZES = {"small": 3, "big": 9}


def mixed(weights: Mapping[str, float], epochs: float | None = None) -> WrittenJob:
    """Four steps of three of its twelve rows."""
    named = [(name, line) for name, size in SIZES.items() for line in range(size)]
    prompts = [Prompt(id=f"{s}/{n}", text="?", token_ids=(63,), answer="aaa", source=s) for s, n in named]
    its = job("fail", 4, prompts)
    section = its.config.sft.model_copy(update={"epochs": epochs})  # which says as many steps
    its.config = its.config.model_copy(update={"sft": section})
    its.prompts = PromptStream(prompts, seed=0, weights=weights)
    return its


def started(its: WrittenJob, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING):
        asyncio.run(its.start(fresh=its.number == 0))
    return caplog.messages


def test_epochs_that_weights_make_other_passes_of_are_told_with_them(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = started(mixed({"small": 1.0, "big": 1.0}, epochs=1), caplog)
    assert said.startswith(
        "sft.epochs=1: by data.sources.<name>.weight the 4 steps pass 2 times over small, 0.667 times"
    )


def test_those_that_are_left_of_a_resume_count_by_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    its = mixed({"small": 1.0, "big": 1.0}, epochs=1)
    its.number = 2
    its.prompts.take(6)
    state = its.prompts.state()
    its.prompts = mixed({"small": 1.0, "big": 5.0}).prompts
    its.prompts.restore(state)
    caplog.clear()
    (said,) = started(its, caplog)
    assert "the 4 steps pass 1.33 times over small, 0.889 times over big" in said


@pytest.mark.parametrize(("weights", "epochs"), [({"small": 2.0, "big": 6.0}, 1.0), ({"small": 1.0, "big": 1.0}, None)])
def test_equal_passes_and_steps_that_no_epochs_say_are_not(
    weights: Mapping[str, float], epochs: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert started(mixed(weights, epochs), caplog) == []


async def test_each_step_records_those_that_it_ends() -> None:
    its, drawn = mixed({"small": 1.0, "big": 1.0}), mixed({"small": 1.0, "big": 1.0}).prompts
    await its.start(fresh=True)
    for row in [dict(await its.step(number, Stopwatch())) for number in range(1, 5)]:
        drawn.take(3)
        assert {name: row[f"source/{name}/epoch"] for name in SIZES} == drawn.epochs()
