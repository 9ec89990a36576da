"""What a job on written text does with rows that the chat template refuses, or that have no turn to learn."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.samples import EndTokens, written_samples
from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.rollout.conversation.written import WrittenConversations
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.jobs import written
from rl_megatron.training.jobs.written import Unit, WrittenJob, held_out_parts
from rl_megatron.types import Prompt
from tests.unit.training.test_long_rows import job

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
    return [int(one.id[2:]) for one in PromptStream([talk(line) for line in range(count)], seed=0).take(count)]


def data(count: int, *refused: int, context: Sequence[int] = ()) -> list[Prompt]:
    """The rows that are drawn at the places ``refused`` have a message that the template refuses, and those at
    ``context`` no turn to learn."""
    bad, read = ({drawn(count)[place] for place in places} for places in (refused, context))
    return [talk(line, role="system" if line in bad else "user", weight=int(line not in read)) for line in range(count)]


def its_job(prompts: list[Prompt], steps: int, **more: object) -> WrittenJob:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.split_special_tokens = TEMPLATE, False
    conversations = WrittenConversations(tokenizer, [tokenizer.eos_token_id])

    def units_of(some: Any) -> list[Unit]:
        return [(row,) for row in conversations.rows(some)]

    return job("fail", steps, prompts, units_of, **{"max_tokens": 99, **more})


async def rows_of(its: WrittenJob, first: int, last: int) -> list[dict[str, Any]]:
    try:
        return [dict(await its.step(number, Stopwatch())) for number in range(first, last + 1)]
    finally:
        await its.close()


async def test_a_refused_row_behind_those_that_were_looked_at_is_left_out_by_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert (row["data/dropped"], row["tokens/learnt"]) == (1, 2 * len("1<"))  # a digit and the token behind it


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
    assert [row["tokens/learnt"] for row in rows] == [4, 2, 6]
    said = "3 of the first 9 rows to train on are refused and left out, by sft.on_refused=drop; the first: "
    first = f"prompt 'd:{drawn(9)[1]}': "
    assert [text[: len(said + first)] for text in caplog.messages] == [said + first] * bool(looked_at)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"": 257}, {"": 258}, "what is learnt ends with the token 258 from here on, and ended with 257 before this"),
        ({"a": 7, "b": None}, {"a": 7, "b": 8}, "what is learnt of data.sources.b ends with the token 8 from here on"),
        ({"": 257}, {"": 257}, ""),
        ({}, {"": 257}, ""),  # an older version's
    ],
)
def test_a_resume_says_that_what_it_learns_ends_otherwise(
    then: EndTokens, now: EndTokens, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    form = TypeAdapter(TrainerState)
    first = replace(its_job(data(6), 2), end_token_ids=then)
    state = form.validate_json(form.dump_json(first.state()))
    asyncio.run(replace(its_job(data(6), 2), end_token_ids=now).restore(state))
    told = [one.getMessage() for one in caplog.records if "ends with" in one.getMessage()]
    assert (len(told), all(one.startswith(said) for one in told)) == (bool(said), True)


@pytest.mark.parametrize("on_refused", ["fail", "drop"])
async def test_rows_without_a_turn_to_learn_are_counted_and_named(
    on_refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    refused = (0,) if on_refused == "drop" else ()  # in the batch of one of them
    its = its_job(data(9, *refused, context=(1, 4, 5)), 3, on_refused=on_refused)
    with caplog.at_level(logging.WARNING):
        await its.start(fresh=True)
        rows = await rows_of(its, 1, 3)
    assert [row["data/dropped"] for row in rows] == [1 + len(refused), 2, 0]
    assert [row["tokens/learnt"] for row in rows] == [4 - 2 * len(refused), 2, 6]
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
    its.prompts.take(3)
    asyncio.run(its.start(fresh=False))
    (row,) = asyncio.run(rows_of(its, 2, 2))
    assert (row["data/dropped"], row["tokens/train"]) == (3, 0)


def test_held_out_rows_without_one_are_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    its = its_job(data(4), 1)
    with caplog.at_level(logging.WARNING):
        parts = held_out_parts(data(4, context=(0, 2)), its.units_of, written_samples, its.config)
    assert sum(part.num_sequences for part in parts) == 2
    assert caplog.text.count("2 of 4 held-out rows have no turn to learn and are left out: ") == 1
    with pytest.raises(
        DataError, match=r"^none of 4 held-out rows is left: 4 of 4 held-out rows have no turn to learn"
    ):
        held_out_parts(data(4, context=range(4)), its.units_of, written_samples, its.config)


def test_a_pair_counts_as_its_two_sequences() -> None:
    config = job("fail", 1).config
    pairs = config.model_copy(update={"job": "dpo"})
    left_out = written.LeftOut(refused=("one", "other"))
    assert (left_out.sequences(config), left_out.sequences(pairs)) == (2, 4)


def test_a_run_of_which_every_row_is_refused_ends_before_its_first_step() -> None:
    said = (
        r"^none of the first 4 rows to train on is left: 4 of the first 4 rows .*: prompt 'd:\d': .*no system message"
    )
    with pytest.raises(DataError, match=said):
        asyncio.run(its_job(data(4, *range(4)), 3, on_refused="drop").start(fresh=True))


def test_held_out_rows_are_left_out_alike(caplog: pytest.LogCaptureFixture) -> None:
    its, fails, prompts = its_job(data(4), 1, on_refused="drop"), its_job(data(4), 1), data(4, 0)
    with pytest.raises(DataError, match=r"on_refused=drop"):
        held_out_parts(prompts, fails.units_of, written_samples, fails.config)
    with caplog.at_level(logging.WARNING):
        parts = held_out_parts(prompts, its.units_of, written_samples, its.config)
    assert sum(part.num_sequences for part in parts) == 3
    assert caplog.text.count("1 of 4 held-out rows are refused and left out, by sft.on_refused=drop; the first: ") == 1
    with pytest.raises(DataError, match=r"^none of 4 held-out rows is left: 4 of 4 held-out rows are refused"):
        held_out_parts(data(4, *range(4)), its.units_of, written_samples, its.config)
