"""What a job on written text says of rows that are too long before its first step."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.samples import supervised_rows, written_samples
from rl_megatron.errors import DataError
from rl_megatron.interfaces import Roles
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.observability import progress
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.jobs import written
from rl_megatron.training.jobs.warm_start import answers
from rl_megatron.training.jobs.written import (
    FineTuning,
    HeldOutLoss,
    SupervisedSteps,
    Unit,
    UnitsOf,
    WrittenJob,
    held_out_parts,
)
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import ParallelDims, Prompt
from tests.unit.training.test_bad_steps import MADE, Kept

NONE = cast(Any, None)
LONG = (4, 8, 9)
DATA = [
    Prompt(id=f"train:{line}", text="?", token_ids=(63,), answer="a" * (10 + line if line in LONG else 3))
    for line in range(1, 11)
]
ORDER = [one.id for one in PromptStream(DATA, seed=0).take(len(DATA))]
FIRST = next(int(name.split(":")[1]) for name in ORDER if int(name.split(":")[1]) in LONG)
TOLD = f"prompt 'train:{FIRST}' has {FIRST + 12} tokens with its answers, sft.max_tokens=10"


def units_of(prompts: Sequence[Prompt]) -> list[Unit]:
    ends = dict.fromkeys((prompt.source for prompt in prompts), 257)
    return [(row,) for row in supervised_rows(prompts, answers(prompts, 0), byte_tokenizer(), ends)]


def job(
    on_long: str, steps: int, prompts: Sequence[Prompt] = DATA, units_of: UnitsOf = units_of, **more: object
) -> WrittenJob:
    """Of three rows a step, with ``more`` keys of its section."""
    sft = {"batch_size": 3, "max_tokens": 10, "on_long": on_long, **more}
    learner, optimizer_steps = Kept(MADE), OptimizerSteps(name="policy", most=0)
    packer = Packer(dims=ParallelDims(), max_tokens=30, attention_cost=0.0)
    return WrittenJob(
        config=RunConfig.model_validate({"job": "sft", "sft": sft, "train": {"steps": steps}}),
        roles=Roles(learners={"policy": learner}, frozen={}, engine=NONE, weights=NONE),
        prompts=PromptStream(prompts, seed=0),
        size=len(prompts),
        units_of=units_of,
        objective=FineTuning(
            supervised=SupervisedSteps(learner=learner, packer=packer, optimizer_steps=optimizer_steps),
            loss=HeldOutLoss(learner=learner, packer=packer, parts=()),
        ),
        optimizer_steps=optimizer_steps,
        name="",
    )


def test_they_are_counted_and_the_first_is_named_before_the_first_step() -> None:
    said = rf"^3 of the first 10 sequences to train on are too long: {TOLD}; raise it, or set sft\.on_long=drop or cut$"
    with pytest.raises(DataError, match=said):
        asyncio.run(job("fail", 400).start(fresh=True))


def test_a_pair_that_is_too_long_is_named_and_none_is_cut() -> None:
    config = RunConfig.model_validate({"job": "dpo", "dpo": {"max_tokens": 10}})
    (unit,) = units_of(DATA[LONG[0] - 1 : LONG[0]])
    with pytest.raises(DataError, match=r"dpo\.max_tokens=10; raise it, or set dpo\.on_long=drop$"):
        written.fitted([unit * 2], config)


@pytest.mark.parametrize("on_long", ["drop", "cut"])
def test_what_happens_to_them_is_logged_and_rows_are_drawn_as_without_the_look(
    on_long: str, caplog: pytest.LogCaptureFixture
) -> None:
    its = job(on_long, 400)
    with caplog.at_level(logging.WARNING):
        asyncio.run(its.start(fresh=True))
    assert caplog.messages == [f"3 of the first 10 sequences to train on are too long: {TOLD}; sft.on_long={on_long}"]
    assert [one.id for one in its.prompts.take(len(DATA))] == ORDER


@pytest.mark.parametrize("on_long", ["drop", "cut"])
def test_a_run_of_which_every_row_is_too_long_ends_before_its_first_step(on_long: str) -> None:
    """Prompts alone have more tokens than a row may have, so that nothing of them can be cut."""
    data = [replace(one, token_ids=(63,) * 11) for one in DATA if int(one.id.split(":")[1]) in LONG]
    its = job(on_long, 400, data)
    said = (
        r"^none of the first 3 rows to train on is left: 3 of the first 3 sequences to train on are too long: prompt "
        rf"'train:\d' has \d+ tokens with its answers, sft\.max_tokens=10; sft\.on_long={on_long}; the longest has 31 "
        r"tokens: raise sft\.max_tokens$"
    )
    with pytest.raises(DataError, match=said):
        asyncio.run(its.start(fresh=True))
    its.number = 1  # a resume goes on, as its data had rows that fit
    asyncio.run(its.start(fresh=False))


def test_a_run_goes_on_whose_rows_that_fit_are_behind_those_that_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = [replace(one, token_ids=(63,) * 11) for one in DATA if int(one.id.split(":")[1]) in LONG]
    monkeypatch.setattr(written, "TOKENS_KEPT", 1)
    with caplog.at_level(logging.WARNING):
        asyncio.run(job("drop", 400, data, batch_size=1).start(fresh=True))
    assert caplog.messages[0].startswith("1 of the first 1 sequences to train on are too long")


def test_rows_that_no_step_draws_are_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    steps = ORDER.index(f"train:{FIRST}") // 3
    assert steps
    with caplog.at_level(logging.WARNING):
        asyncio.run(job("fail", steps).start(fresh=True))
    assert caplog.messages == []


def test_so_many_tokens_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = ORDER.index(f"train:{FIRST}") // 3  # before the one with a long row, each of 3 times 5 tokens
    monkeypatch.setattr(written, "TOKENS_KEPT", 15 * batches + 1)
    with pytest.raises(DataError, match=rf"of the first {3 * batches + 3} sequences"):
        asyncio.run(job("fail", 400).start(fresh=True))


async def test_rows_that_were_looked_at_are_made_once_and_trained_on_in_the_order_of_the_seed() -> None:
    """The fourth step has one row that was looked at, whose batch ends there, and two of the next epoch."""
    its, made = job("drop", 4), list[list[str]]()

    def noted(prompts: Sequence[Prompt]) -> list[Unit]:
        made.append([prompt.id for prompt in prompts])
        return units_of(prompts)

    its.units_of = noted
    await its.start(fresh=True)
    learnt = []
    for number in range(1, 5):
        row = await its.step(number, Stopwatch())
        learnt.append(int(str(row["data/dropped"])))
        assert row["steps/skipped"] == 0
    await its.close()
    dropped = learnt
    drawn = [prompt.id for prompt in PromptStream(DATA, seed=0).take(12)]
    batches = [drawn[start : start + 3] for start in range(0, 12, 3)]
    assert dropped == [sum(int(name.split(":")[1]) in LONG for name in batch) for batch in batches]
    assert made == [*batches[:3], batches[3][:1], batches[3]]


def test_a_look_that_takes_its_time_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, wanted in ((0.0, [3, 6, 9, 10]), (math.inf, list[int]())):
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_NOTES", seconds)
        its, said = job("drop", 400), list[str]()
        its.note = said.append
        asyncio.run(its.start(fresh=True))
        assert said == [f"looking for rows that are too long: {count} of 10" for count in wanted]


def test_prompts_are_drawn_in_the_thread_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are read from a file and tokenized, the event loop would wait for them."""
    threads, take, its = list[str](), PromptStream.take, job("drop", 2)

    def noted(self: PromptStream, count: int) -> list[Prompt]:
        threads.append(threading.current_thread().name)
        return take(self, count)

    monkeypatch.setattr(PromptStream, "take", noted)
    asyncio.run(its.step(1, Stopwatch()))
    assert threads[0].startswith("rows")
    assert set(threads) == {threads[0]}


async def test_those_that_the_data_lost_as_it_was_read_are_counted_at_the_first_step_alone() -> None:
    its, long = job("drop", 2), [int(name.split(":")[1]) in LONG for name in ORDER]
    its.dropped = 5
    assert [(await its.step(number, Stopwatch()))["data/dropped"] for number in (1, 2)] == [
        5 + sum(long[:3]),
        sum(long[3:6]),
    ]


@pytest.mark.parametrize(("on_long", "dropped", "cut"), [("drop", 3, 0), ("cut", 0, 3)])
def test_held_out_ones_are_logged_with_both_numbers(
    on_long: str, dropped: int, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        parts = held_out_parts(DATA, units_of, written_samples, job(on_long, 1).config)
    assert sum(part.num_sequences for part in parts) == len(DATA) - dropped
    said = (
        f"{dropped} of 10 held-out sequences are left out and {cut} are cut, by sft.max_tokens=10 and on_long={on_long}"
    )
    assert caplog.messages == [f"{said}: metrics of eval/ are of the others, and of what fits"]
    caplog.clear()
    held_out_parts([one for one in DATA if len(one.answer) == 3], units_of, written_samples, job(on_long, 1).config)
    assert caplog.messages == []
