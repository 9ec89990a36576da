"""Prompts that teachers read in place of the policy's: made of their row's fields, of few enough tokens."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.build.data import load_data, training_data
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.data import ArithmeticRunData, FileRunData, MixtureData
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.problems.mixture import MixtureState
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.models.tiny import byte_tokenizer

ROWS = [
    {"question": "1+{answer}", "answer": "2", "why": {"steps": "one and {prompt}"}, "worth": 0.5},
    {"question": "café", "answer": "3", "why": {"steps": "long " * 9}, "worth": [1]},
]
FORM = '{prompt}\n\\frac{{a}}{{b}} \\boxed{{{answer}}} {why.steps} {worth} {{"of": {{"x": "{answer}"}}}}'


def teacher(prompt: str = FORM, most: int = 75, **keys: Any) -> TeacherSection:
    return TeacherSection(path=Path("t"), prompt=prompt, max_prompt_tokens=most, **keys)


def files(folder: Path, suffix: str, rows: list[dict[str, Any]], **keys: Any) -> FileRunData:
    train, held_out = folder / f"train{suffix}", folder / "eval.jsonl"
    held_out.write_text(json.dumps({"question": "9", "answer": "9"}))
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), train)
    else:
        train.write_text("\n".join(map(json.dumps, rows)))
    return FileRunData(type="files", train=train, eval=held_out, **keys)


def loaded(data: Any, teachers: Mapping[str, TeacherSection], long: Any = "fail") -> list[dict[str, str]]:
    """What the teachers read of each prompt to train on."""
    train, held_out = load_prompts(
        data, byte_tokenizer(), max_prompt_tokens=40, on_long_prompt=long, seed=0, teachers=teachers
    )
    assert not any(prompt.read_by for prompt in held_out)
    return [{name: bytes(ids).decode() for name, ids in prompt.read_by.items()} for prompt in train]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("chat", [False, True])
def test_fields_of_the_row_are_put_in_once_and_the_chat_template_is_the_policys(
    tmp_path: Path, suffix: str, chat: bool
) -> None:
    rows = ROWS[:1]
    found = loaded(
        files(tmp_path, suffix, rows, prompt_template="Q {prompt}", chat_template=chat), {"t": teacher(most=99)}
    )
    text = FORM.format(prompt="1+{answer}", answer="2", why=SimpleNamespace(**ROWS[0]["why"]), worth=0.5)
    assert '\\frac{a}{b} \\boxed{2} one and {prompt} 0.5 {"of": {"x": "2"}}' in text
    assert found == [{"t": f"user: {text}\nassistant: " if chat else text}]


@pytest.mark.parametrize("chat", [False, True])
def test_the_place_of_another_completion_is_between_the_tokens_around_it(tmp_path: Path, chat: bool) -> None:
    form = teacher("{answer}: {right_completion}\n{prompt}", most=45 if chat else 17)
    data = files(tmp_path, ".jsonl", ROWS[:1], chat_template=chat)
    train, _ = load_prompts(
        data, byte_tokenizer(), max_prompt_tokens=40, on_long_prompt="fail", seed=0, teachers={"t": form}
    )
    ids = train[0].read_by["t"]
    before, behind = ids[: ids.index(-1)], ids[ids.index(-1) + 1 :]
    wanted = ("user: 2: ", "\n1+{answer}\nassistant: ") if chat else ("2: ", "\n1+{answer}")
    assert (bytes(before).decode(), bytes(behind).decode()) == wanted
    short = form.model_copy(update={"max_prompt_tokens": len(before) + len(behind) - 1})
    with pytest.raises(DataError, match=f"the prompt has {len(before) + len(behind)} tokens, algorithm.kl.teachers.t"):
        load_prompts(data, byte_tokenizer(), max_prompt_tokens=40, on_long_prompt="fail", seed=0, teachers={"t": short})


def test_a_generated_sum_has_its_answer() -> None:
    (first, *_) = loaded(ArithmeticRunData(digits=1, num_eval=2), {"t": teacher("{answer} {prompt}=")})
    answer, _, question = first["t"].rstrip("=").partition(" ")
    a, b = question.split("+")
    assert int(answer[::-1]) == int(a) + int(b)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_longer_one_fails_or_is_dropped_by_its_own_key(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**row, "worth": 1} for row in ROWS]
    data, key = files(tmp_path, suffix, rows), "algorithm.kl.teachers.t.max_prompt_tokens=75"
    length = len(FORM.format(prompt="café", answer="3", why=SimpleNamespace(**ROWS[1]["why"]), worth=1).encode())
    with pytest.raises(DataError, match=f":2: the prompt has {length} tokens, {key}.*rollout.on_long_prompt=drop"):
        loaded(data, {"t": teacher()})
    with caplog.at_level(logging.WARNING):
        if suffix == ".jsonl":
            assert len(loaded(data, {"t": teacher()}, "drop")) == 1
            assert f"dropped 1 of 2 prompts with more than {key} tokens; the first is" in caplog.text
        else:
            with pytest.raises(DataError, match="'train:2' has too many tokens"):
                loaded(data, {"t": teacher()}, "drop")
            assert f"dropped 1 prompts so far that have more tokens than {key} when they were drawn" in caplog.text


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_field_that_a_row_lacks_or_that_is_null_is_named_with_the_row(tmp_path: Path, suffix: str) -> None:
    """Before a row is drawn; of rows that are left out, nothing is asked."""

    def load(folder: Path, rows: list[dict[str, Any]], name: str, **keys: Any) -> None:
        data, taught = files(folder, suffix, rows), {"t": teacher(f"{{prompt}} {{{name}}}")}
        load_prompts(
            data, byte_tokenizer(), max_prompt_tokens=40, on_long_prompt="fail", seed=0, teachers=taught, **keys
        )

    rows = [{"question": "1", "answer": "2", "hint": "3"}]
    row = "" if suffix == ".parquet" else ":1"  # of a parquet file its footer says so
    for name in ("solution", "question"):
        said = rf"train\{suffix}{row}: no field '{name}'; it has .*, for algorithm.kl.teachers.t.prompt"
        with pytest.raises(DataError, match=said + r"; \{prompt\} and \{answer\} are the problem"):
            load(tmp_path, rows, name)
    (tmp_path / "null").mkdir()
    whole = {**rows[0], "why": {"steps": "4"}, "solution": "4", "score": 1.5}
    null = {**whole, "question": "9", "why": None, "solution": None, "score": math.nan, "worth": -math.inf}
    whole["worth"] = 1.5
    for name in ("solution", "why.steps", "why", "score", "worth"):
        said = rf":2: field '{name}' is null, or a number that is not finite, for algorithm.kl.teachers.t.prompt; give"
        with pytest.raises(DataError, match=said):
            load(tmp_path / "null", [whole, null], name)
        load(tmp_path / "null", [whole, null], name, on_leak="drop")  # the second is held out


def test_a_field_of_a_parquet_file_that_is_no_text_is_named_before_it_is_drawn(tmp_path: Path) -> None:
    data = files(tmp_path, ".parquet", [{"question": f"{n}", "answer": "2", "why": "é"} for n in range(3)])
    table = pq.read_table(data.train)
    broken = pa.array([b"a", b"\xff", b"b"]).view(pa.string())
    pq.write_table(table.set_column(2, "why", broken), data.train)
    with pytest.raises(DataError, match=r"train.parquet:2: field 'why' cannot be read: .*UTF8.*, for algorithm"):
        load_prompts(
            data,
            byte_tokenizer(),
            max_prompt_tokens=40,
            on_long_prompt="fail",
            seed=0,
            teachers={"t": teacher("{prompt} {why}")},
        )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_resume_refuses_other_texts_of_a_teacher(tmp_path: Path, suffix: str) -> None:
    """Keys of a row in another order are the same row in JSON lines, where tokens and bytes do not count."""

    def stream(row: dict[str, Any]) -> PromptStream:
        data, taught = files(tmp_path, suffix, [row]), {"t": teacher("{prompt} {why.steps}")}
        train, _ = load_prompts(
            data, byte_tokenizer(), max_prompt_tokens=40, on_long_prompt="fail", seed=0, teachers=taught
        )
        return PromptStream(train, seed=0)

    state, other = stream(ROWS[0]).state(), {**ROWS[0], "why": {"steps": "one and 1"}}
    assert not isinstance(state, MixtureState)
    if suffix == ".jsonl":
        stream(dict(reversed(ROWS[0].items()))).restore(state)
    with pytest.raises(CheckpointError, match="but with others, by their digest; resume with the same files"):
        stream(other).restore(state)


def test_prompts_of_a_source_have_those_of_its_own_teachers(tmp_path: Path) -> None:
    made = {name: {"type": "arithmetic", "digits": digits, "num_eval": 9} for name, digits in (("one", 1), ("two", 2))}
    data = MixtureData.model_validate({"type": "mixture", "sources": made})
    found = loaded(data, {"both": teacher("{prompt}"), "of_two": teacher("{prompt}", sources=("two",))})
    assert {tuple(sorted(one)) for one in found if len(one["both"]) == 3} == {("both",)}
    assert {tuple(sorted(one)) for one in found if len(one["both"]) == 5} == {("both", "of_two")}


def test_an_evaluation_has_no_teachers_and_wants_no_field_of_theirs(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    data = files(tmp_path, ".jsonl", ROWS[:1])
    given = ["algorithm=distill", "data.type=files", f"data.train={data.train}", f"data.eval={data.eval}"]
    of = ["path=tests", "prompt={prompt} {solution}", "max_prompt_tokens=40"]
    config = load_config("tiny_cpu", [*given, *(f"algorithm.kl.teachers.t.{key}" for key in of)])
    assert len(load_data(config, tmp_path).train) == 1
    with pytest.raises(DataError, match="no field 'solution'"):
        training_data(config, tmp_path)
