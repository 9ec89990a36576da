"""Jobs on written text before their first step: rows too long, rows left out, mixtures; and a warm start."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from rl_megatron.agents.conversation.written import ConversationRows
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.samples import EndTokens, supervised_rows, supervised_samples
from rl_megatron.errors import DataError, EnvironmentFailure
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.observability import progress
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.jobs import warm_start as warm_starts
from rl_megatron.training.jobs import written
from rl_megatron.training.jobs.warm_start import Targets, WarmStart, answers
from rl_megatron.training.jobs.written import (
    DatasetJob,
    SFTObjective,
    SupervisedSteps,
    Unit,
    UnitsOf,
    held_out_parts,
)
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import ParallelDims, Prompt
from tests.unit.training.test_bad_steps import MADE, Kept

LONG = (4, 8, 9)
DATA = [
    Prompt(id=f"train:{line}", text="?", token_ids=(63,), answer="a" * (10 + line if line in LONG else 3))
    for line in range(1, 11)
]
ORDER = [one.id for one in PromptStream(DATA, seed=0).next_prompts(len(DATA))]
FIRST = next(int(name.split(":")[1]) for name in ORDER if int(name.split(":")[1]) in LONG)
TOLD = f"prompt 'train:{FIRST}' has {FIRST + 12} tokens with its answers, sft.max_tokens=10"


def units_of(prompts: Sequence[Prompt]) -> list[Unit]:
    ends = dict.fromkeys((prompt.source for prompt in prompts), 257)
    return [(row,) for row in supervised_rows(prompts, answers(prompts, 0), byte_tokenizer(), ends)]


def job(
    on_long: str, steps: int, prompts: Sequence[Prompt] = DATA, units_of: UnitsOf = units_of, **more: object
) -> DatasetJob:
    """Of three rows a step, with ``more`` keys of its section."""
    sft = {"batch_size": 3, "max_tokens": 10, "on_long": on_long, **more}
    learner, optimizer_steps = Kept(MADE), OptimizerSteps(name="policy")
    packer = Packer(dims=ParallelDims(), max_tokens=30, attention_cost=0.0)
    return DatasetJob(
        config=RunConfig.model_validate({"job": "sft", "sft": sft, "train": {"steps": steps}}),
        roles=RunComponents(learners={"policy": learner}, frozen_models={}, engine=NONE, weight_sync=NONE),
        prompts=PromptStream(prompts, seed=0),
        size=len(prompts),
        units_of=units_of,
        objective=SFTObjective(
            supervised=SupervisedSteps(learner=learner, packer=packer, optimizer_steps=optimizer_steps),
            parts=(),
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
        written.fit_rows([unit * 2], config)


@pytest.mark.parametrize("on_long", ["drop", "cut"])
def test_what_happens_is_logged_and_the_look_changes_no_draw(on_long: str, caplog: pytest.LogCaptureFixture) -> None:
    its = job(on_long, 400)
    with caplog.at_level(logging.WARNING):
        asyncio.run(its.start(fresh=True))
    assert caplog.messages == [f"3 of the first 10 sequences to train on are too long: {TOLD}; sft.on_long={on_long}"]
    assert [one.id for one in its.prompts.next_prompts(len(DATA))] == ORDER


@pytest.mark.parametrize("on_long", ["drop", "cut"])
def test_a_run_of_which_every_row_is_too_long_ends_before_its_first_step(on_long: str) -> None:
    """Prompts alone have more tokens than a row may have, so that nothing of them can be cut."""
    its = job(on_long, 400, [replace(one, token_ids=(63,) * 11) for one in DATA if int(one.id.split(":")[1]) in LONG])
    said = (
        r"^none of the first 3 rows to train on is left: 3 of the first 3 sequences to train on are too long: prompt "
        rf"'train:\d' has \d+ tokens with its answers, sft\.max_tokens=10; sft\.on_long={on_long}; the longest has 31 "
        r"tokens: raise sft\.max_tokens$"
    )
    with pytest.raises(DataError, match=said):
        asyncio.run(its.start(fresh=True))
    its.number = 1  # a resume goes on, as its data had rows that fit
    asyncio.run(its.start(fresh=False))


def test_fitting_rows_may_follow_the_look(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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
    learned = []
    for number in range(1, 5):
        row = await its.step(number, Stopwatch())
        learned.append(int(str(row["data/dropped"])))
        assert row["steps/skipped"] == 0
    await its.close()
    dropped = learned
    drawn = [prompt.id for prompt in PromptStream(DATA, seed=0).next_prompts(12)]
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
    threads, take, its = list[str](), PromptStream.next_prompts, job("drop", 2)

    def noted(self: PromptStream, count: int) -> list[Prompt]:
        threads.append(threading.current_thread().name)
        return take(self, count)

    monkeypatch.setattr(PromptStream, "next_prompts", noted)
    asyncio.run(its.step(1, Stopwatch()))
    assert threads[0].startswith("rows")
    assert set(threads) == {threads[0]}


async def test_those_that_the_data_lost_as_it_was_read_are_counted_at_the_first_step_alone() -> None:
    its, long = job("drop", 2), [int(name.split(":")[1]) in LONG for name in ORDER]
    its.dropped = 5
    assert [(await its.step(n, Stopwatch()))["data/dropped"] for n in (1, 2)] == [5 + sum(long[:3]), sum(long[3:6])]


@pytest.mark.parametrize(("on_long", "dropped", "cut"), [("drop", 3, 0), ("cut", 0, 3)])
def test_held_out_ones_are_counted(on_long: str, dropped: int, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parts = held_out_parts(DATA, units_of, supervised_samples, job(on_long, 1).config)
    assert sum(part.num_sequences for part in parts) == len(DATA) - dropped
    said = (
        f"{dropped} of 10 held-out sequences are left out and {cut} are cut, by sft.max_tokens=10 and on_long={on_long}"
    )
    assert caplog.messages == [f"{said}: metrics of eval/ are of the others, and of what fits"]
    caplog.clear()
    held_out_parts([one for one in DATA if len(one.answer) == 3], units_of, supervised_samples, job(on_long, 1).config)
    assert caplog.messages == []


# What a job on written text does with rows that the chat template refuses, or that have no turn to learn.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def talk(line: int, *, role: str = "user", weight: int = 1) -> Prompt:
    messages: list[dict[str, Any]] = [{"role": role, "content": "?"}, {"role": "assistant", "content": str(line)}]
    messages[1]["weight"] = weight
    return Prompt(id=f"d:{line}", text=json.dumps({"messages": messages, "tools": []}), token_ids=(), answer="")


def drawn(count: int) -> list[int]:
    """The lines of ``count`` rows in the order in which they are drawn."""
    return [int(one.id[2:]) for one in PromptStream([talk(line) for line in range(count)], seed=0).next_prompts(count)]


def data(count: int, *refused: int, context: Sequence[int] = ()) -> list[Prompt]:
    """The rows that are drawn at the places ``refused`` have a message that the template refuses, and those at
    ``context`` no turn to learn."""
    bad, read = ({drawn(count)[place] for place in places} for places in (refused, context))
    return [talk(line, role="system" if line in bad else "user", weight=int(line not in read)) for line in range(count)]


def its_job(prompts: list[Prompt], steps: int, **more: object) -> DatasetJob:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.split_special_tokens = TEMPLATE, False
    conversations = ConversationRows(tokenizer, [tokenizer.eos_token_id])

    def units_of(some: Any) -> list[Unit]:
        return [(row,) for row in conversations.rows(some)]

    return job("fail", steps, prompts, units_of, **{"max_tokens": 99, **more})


async def rows_of(its: DatasetJob, first: int, last: int) -> list[dict[str, Any]]:
    try:
        return [dict(await its.step(number, Stopwatch())) for number in range(first, last + 1)]
    finally:
        await its.close()


async def test_a_refused_row_behind_the_look_is_left_out_by_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "_LOOKED_AT", 3)
    prompts, name = data(9, 7), f"d:{drawn(9)[7]}"
    its = its_job(prompts, 3)
    await its.start(fresh=True)
    for number in (1, 2):
        await its.step(number, Stopwatch())
    saved = its.state()
    said = rf"^prompt '{name}': .*no system message.*; or leave such rows out with sft\.on_refused=drop, which a res"
    with pytest.raises(DataError, match=said):
        await its.step(3, Stopwatch())
    await its.close()
    resumed = its_job(prompts, 3, on_refused="drop")
    await resumed.restore(saved)
    await resumed.start(fresh=False)
    (row,) = await rows_of(resumed, 3, 3)
    assert row["data/dropped"] == 1


@pytest.mark.parametrize("looked_at", [0, 9])
async def test_it_is_counted_in_the_row_of_its_step(
    looked_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(written, "_LOOKED_AT", looked_at)
    its = its_job(data(9, 1, 4, 5), 3, on_refused="drop")
    with caplog.at_level(logging.WARNING):
        await its.start(fresh=True)
        rows = await rows_of(its, 1, 3)
    assert [row["data/dropped"] for row in rows] == [1, 2, 0]
    said = "3 of the first 9 rows to train on are refused and left out, by sft.on_refused=drop; the first: "
    first = f"prompt 'd:{drawn(9)[1]}': "
    assert [text[: len(said + first)] for text in caplog.messages] == [said + first] * bool(looked_at)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"": 257}, {"": 258}, "what is learned ends with the token 258 from here on, and ended with 257 before this"),
        ({"a": 7, "b": None}, {"a": 7, "b": 8}, "what is learned of data.sources.b ends with the token 8 from here on"),
        ({"": 257}, {"": 257}, ""),
        ({}, {"": 257}, ""),  # an older version's
    ],
)
def test_a_resume_tells_new_ends(then: EndTokens, now: EndTokens, said: str, caplog: pytest.LogCaptureFixture) -> None:
    form = TypeAdapter(TrainerState)
    state = form.validate_json(form.dump_json(replace(its_job(data(6), 2), end_token_ids=then).state()))
    asyncio.run(replace(its_job(data(6), 2), end_token_ids=now).restore(state))
    told = [one.getMessage() for one in caplog.records if "ends with" in one.getMessage()]
    assert (len(told), all(one.startswith(said) for one in told)) == (bool(said), True)


@pytest.mark.parametrize("on_refused", ["fail", "drop"])
async def test_rows_without_turns_are_counted_and_named(on_refused: str, caplog: pytest.LogCaptureFixture) -> None:
    refused = (0,) if on_refused == "drop" else ()  # in the batch of one of them
    its = its_job(data(9, *refused, context=(1, 4, 5)), 3, on_refused=on_refused)
    with caplog.at_level(logging.WARNING):
        await its.start(fresh=True)
        rows = await rows_of(its, 1, 3)
    assert [row["data/dropped"] for row in rows] == [1 + len(refused), 2, 0]
    said = "3 of the first 9 rows to train on have no turn to learn and are left out: their messages of the assistant "
    said += f"have a weight of 0, or there are none; the first: prompt 'd:{drawn(9)[1]}'"
    assert caplog.messages[len(refused) :] == [said]


def test_a_run_of_which_no_row_has_a_turn_to_learn_ends_before_its_first_step() -> None:
    said = r"^none of the first 4 rows to train on is left: 4 of the first 4 rows to train on have no turn to learn"
    with pytest.raises(DataError, match=said):
        asyncio.run(its_job(data(4, context=range(4)), 3).start(fresh=True))


def test_a_resume_may_end_with_rows_of_which_none_has_one() -> None:
    its = its_job(data(6, context=(3, 4, 5)), 2)
    its.number = 1
    its.prompts.next_prompts(3)
    asyncio.run(its.start(fresh=False))
    (row,) = asyncio.run(rows_of(its, 2, 2))
    assert (row["data/dropped"], row["tokens/train"]) == (3, 0)


def test_held_out_rows_without_one_are_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    its = its_job(data(4), 1)
    with caplog.at_level(logging.WARNING):
        parts = held_out_parts(data(4, context=(0, 2)), its.units_of, supervised_samples, its.config)
    assert sum(part.num_sequences for part in parts) == 2
    assert caplog.text.count("2 of 4 held-out rows have no turn to learn and are left out: ") == 1
    with pytest.raises(DataError, match=r"^none of 4 held-out rows is left: 4 of 4 held-out rows have no turn"):
        held_out_parts(data(4, context=range(4)), its.units_of, supervised_samples, its.config)


def test_a_pair_counts_as_its_two_sequences() -> None:
    config = job("fail", 1).config
    pairs = config.model_copy(update={"job": "dpo"})
    left_out = written.SkippedRows(refused=("one", "other"))
    assert (left_out.sequences(config), left_out.sequences(pairs)) == (2, 4)


def test_a_run_of_which_every_row_is_refused_ends_before_its_first_step() -> None:
    said = r"^none of the first 4 rows to train on is left: 4 of the first 4 rows .*: prompt 'd:\d': .*no system"
    with pytest.raises(DataError, match=said):
        asyncio.run(its_job(data(4, *range(4)), 3, on_refused="drop").start(fresh=True))


def test_held_out_rows_are_left_out_alike(caplog: pytest.LogCaptureFixture) -> None:
    its, fails, prompts = its_job(data(4), 1, on_refused="drop"), its_job(data(4), 1), data(4, 0)
    with pytest.raises(DataError, match=r"on_refused=drop"):
        held_out_parts(prompts, fails.units_of, supervised_samples, fails.config)
    with caplog.at_level(logging.WARNING):
        parts = held_out_parts(prompts, its.units_of, supervised_samples, its.config)
    assert sum(part.num_sequences for part in parts) == 3
    assert caplog.text.count("1 of 4 held-out rows are refused and left out, by sft.on_refused=drop; the first: ") == 1
    with pytest.raises(DataError, match=r"^none of 4 held-out rows is left: 4 of 4 held-out rows are refused"):
        held_out_parts(data(4, *range(4)), its.units_of, supervised_samples, its.config)


# What a job on written text says of the passes over each source of a mixture.
SIZES = {"small": 3, "big": 9}


def mixed(weights: Mapping[str, float], epochs: float | None = None) -> DatasetJob:
    """Four steps of three of its twelve rows."""
    named = [(name, line) for name, size in SIZES.items() for line in range(size)]
    prompts = [Prompt(id=f"{s}/{n}", text="?", token_ids=(63,), answer="aaa", source=s) for s, n in named]
    its = job("fail", 4, prompts)
    section = its.config.sft.model_copy(update={"epochs": epochs})  # which says as many steps
    its.config = its.config.model_copy(update={"sft": section})
    its.prompts = PromptStream(prompts, seed=0, weights=weights)
    return its


def started(its: DatasetJob, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING):
        asyncio.run(its.start(fresh=its.number == 0))
    return caplog.messages


def test_epochs_that_weights_make_other_passes_of_are_told_with_them(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = started(mixed({"small": 1.0, "big": 1.0}, epochs=1), caplog)
    assert said.startswith("sft.epochs=1: by data.sources.<name>.weight the 4 steps pass 2 times over small, 0.667")


def test_those_that_are_left_of_a_resume_count_by_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    its = mixed({"small": 1.0, "big": 1.0}, epochs=1)
    its.number = 2
    its.prompts.next_prompts(6)
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
        drawn.next_prompts(3)
        assert {name: row[f"source/{name}/epoch"] for name in SIZES} == drawn.epochs()


# What a warm start looks at before its first step, as none of its steps is in a checkpoint.
NONE: Any = None


def prompts(*lengths: int) -> list[Prompt]:
    """With answers of so many tokens."""
    return [Prompt(id=f"train:{n}", text="?", token_ids=(63,), answer="a" * size) for n, size in enumerate(lengths, 1)]


def warm_start(data: Sequence[Prompt], targets: Targets = answers, *keys: str) -> WarmStart:
    """Of three steps of two prompts; a prompt and 30 tokens of an answer fit a micro-batch."""
    given = ["learner.max_tokens_per_micro_batch=31", "warm_start.steps=3", "warm_start.batch_size=2"]
    learner = Kept(MADE)
    return WarmStart(
        config=load_config("tiny_cpu", [*given, *keys]),
        roles=RunComponents(learners={"policy": learner}, frozen_models={}, engine=NONE, weight_sync=NONE),
        prompts=PromptStream(data, seed=0),
        tokenizer=byte_tokenizer(),
        end_token_ids={"": 257},
        stop_token_ids=(257, 258),
        vocab_size=259,
        targets=targets,
        evaluation=NONE,
        supervised=SupervisedSteps(
            learner=learner,
            packer=Packer(dims=ParallelDims(), max_tokens=31, attention_cost=0.0),
            optimizer_steps=OptimizerSteps(name="policy"),
        ),
    )


LATE = (
    r"^prompt 'train:4' has 32 positions with what warm_start\.steps=3 learns of it, but learner\."
    r"max_tokens_per_micro_batch=31; raise the latter, leave the row out, or set warm_start\.steps=0$"
)


def test_a_long_answer_is_named_before_the_first_step() -> None:
    with pytest.raises(DataError, match=LATE):
        asyncio.run(warm_start(prompts(1, 2, 3, 31, 4, 5)).start(fresh=True))


def test_an_answer_that_spells_the_end_of_one_is_named_before_the_first_step() -> None:
    ours = warm_start(prompts(1, 2), lambda drawn, _: [("2<eos>",) for _ in drawn])
    ours.tokenizer.split_special_tokens = False
    with pytest.raises(
        DataError, match=r"^prompt 'train:\d': its answer contains the text of a token that ends sampling \(id 257\)"
    ):
        asyncio.run(ours.start(fresh=True))


def test_an_answer_that_is_marked_as_bad_is_named_before_the_first_step() -> None:
    """As of KTO's rows; not a label that is the answer itself."""
    data = [replace(one, meta={"label": one.id != "train:2"}) for one in prompts(1, 2, 3)]
    with pytest.raises(DataError, match=r"^prompt 'train:2': field 'label' is false, which says of KTO's rows"):
        asyncio.run(warm_start(data).start(fresh=True))
    asyncio.run(warm_start([replace(one, answer="false") for one in data]).start(fresh=True))


def test_an_answer_that_just_fits_is_learned_in_the_order_of_the_seed() -> None:
    ours, data = warm_start(prompts(1, 2, 3, 30, 4, 5)), prompts(1, 2, 3, 30, 4, 5)
    asyncio.run(ours.start(fresh=True))
    assert ours.prompts.next_prompts(6) == PromptStream(data, seed=0).next_prompts(6)


def test_a_resume_looks_at_what_is_left() -> None:
    data = prompts(1, 2, 3, 31, 4, 5)
    drawn = [prompt.id for prompt in PromptStream(data, seed=0).next_prompts(6)]
    done = drawn.index("train:4") // 2 + 1  # steps, the long answer's among them
    ours = warm_start(data)
    ours.prompts.next_prompts(2 * done)
    ours.number = done
    assert ours.state().ends == {"": 257}  # that another version, or another tokenizer's, is compared with
    asyncio.run(ours.start(fresh=False))
    assert [prompt.id for prompt in ours.prompts.next_prompts(6 - 2 * done)] == drawn[2 * done :]


def test_a_demonstration_that_is_long_in_a_later_epoch_is_named_in_its_step() -> None:
    def longer(drawn: Sequence[Prompt], step: int) -> list[tuple[str, ...]]:
        return [("a", "b" * 10 * step, "c") for _ in drawn]

    ours = warm_start(prompts(1, 2), longer)
    asyncio.run(ours.start(fresh=True))
    with pytest.raises(DataError, match=r"^prompt 'train:\d' has 34 positions"):
        asyncio.run(ours.step(3, Stopwatch()))


async def test_rows_of_the_first_epoch_are_made_once_and_learned_as_they_were_looked_at() -> None:
    made = list[tuple[int, list[str]]]()

    def noted(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        made.append((step, [prompt.id for prompt in drawn]))
        return [(f"{step}",) for _ in drawn]

    ours = warm_start(prompts(1, 2, 3, 4), noted, "warm_start.steps=4")
    kept = ours.supervised.learner
    assert isinstance(kept, Kept)
    await ours.start(fresh=True)
    learned = []
    for number in range(1, 5):
        await ours.step(number, Stopwatch())
        learned.append([int(ids[-1]) for part in kept.batch.micro_batches[0] for ids in (part.input_ids,)])
    assert learned == [[ord(f"{number}")] for number in range(1, 5)]
    assert [step for step, _ in made] == [1, 2, 3, 4]
    drawn = [prompt.id for prompt in PromptStream(prompts(1, 2, 3, 4), seed=0).next_prompts(8)]
    assert [name for _, names in made for name in names] == drawn


async def test_rows_beyond_those_that_are_kept_are_made_again_in_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows a step of a prompt, a letter and the end; the look says how far it is."""
    monkeypatch.setattr(warm_starts, "TOKENS_KEPT", 12)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_NOTES", 0.0)
    made, said = list[int](), list[str]()

    def noted(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        made.append(step)
        return answers(drawn, step)

    ours = warm_start(prompts(*[1] * 6), noted)
    ours.note = said.append
    await ours.start(fresh=True)
    for number in range(1, 4):
        await ours.step(number, Stopwatch())
    assert made == [1, 2, 3, 3]
    assert said == [f"looking at what the warm start learns: step {step} of 3" for step in (1, 2, 3)]


async def test_a_demonstration_that_takes_its_time_does_not_hold_up_the_event_loop() -> None:
    answered = threading.Event()

    def waits(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        assert answered.wait(10), "the event loop did not get a turn"
        return [("a",) for _ in drawn]

    asyncio.get_running_loop().call_later(0.0, answered.set)
    await warm_start(prompts(1, 2), waits).step(1, Stopwatch())


def test_demonstrations_that_never_end_end_the_run_and_keep_no_thread_waiting() -> None:
    ever = threading.Event()

    def hangs(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        ever.wait(20)
        return []

    ours = warm_start(prompts(1, 2), hangs, "run.watchdog_seconds=0.1")
    with pytest.raises(EnvironmentFailure, match=r"step 1: its rows took more than 0\.1 s \(run\.watchdog_seconds\)"):
        asyncio.run(ours.start(fresh=True))
    ever.set()
