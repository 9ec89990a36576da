"""Conversations and pairs in parquet: the prompts, draws and verdicts of the same rows in jsonl, without being held."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_megatron.agents.conversation.forms import check_answers
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.data import FileRunData, MixtureData
from rl_megatron.config.sections.jobs import RowsOf
from rl_megatron.data.problems import parquet, pool
from rl_megatron.data.problems.leaks import ANSWERED, digest_texts, hash_texts, normalize_whitespace
from rl_megatron.data.problems.parquet import FileRows, ParquetRows
from rl_megatron.data.problems.pool import PromptPool, PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.data.samples import answer_pairs, supervised_rows
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.training.jobs.warm_start import answers
from rl_megatron.training.jobs.written import Unit, fit_rows
from tests.data_files import written

FORMS: dict[str, dict[str, str]] = {
    "conversations": {"messages": "good"},
    "pairs of conversations": {"messages": "good", "rejected": "bad", "margin": "m"},
    "answers": {"prompt": "q", "answer": "good"},
    "pairs of answers": {"prompt": "q", "answer": "good", "rejected": "bad", "margin": "m"},
}


PROBLEMS = ("answers", "pairs of answers")


def talk(asked: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def row(form: str, asked: str, good: str, bad: str, m: float = 0.5) -> dict[str, Any]:
    more = {"m": m, "level": m / 7, "tags": ["a", "b"]}
    if form in PROBLEMS:
        return {"q": asked, "good": good, "bad": bad, **more}
    return {"good": talk(asked, good), "bad": talk(asked, bad), **more}


def made(form: str, count: int, seed: int, values: int = 20) -> list[dict[str, Any]]:
    """Rows of which some differ in white space alone."""
    draw = random.Random(seed)
    return [
        row(
            form,
            f"{draw.randrange(values)} {draw.choice(('', ' '))}+ é?",
            draw.choice("12"),
            draw.choice("34"),
            draw.randrange(9),
        )
        for _ in range(count)
    ]


def loaded(form: str, train: Path, held_out: Path) -> PromptPool:
    keys = {"type": "files", "train": train, "eval": held_out, "on_leak": "drop"}
    data = FileRunData.model_validate(keys | {"fields": FORMS[form]})
    return load(data, rows="pairs" if "rejected" in FORMS[form] else "answers")


def load(
    data: FileRunData | MixtureData, *, rows: RowsOf = "answers", limit: int = 99, long: str = "fail"
) -> PromptPool:
    form = RowForm(tokenizer=byte_tokenizer(), max_tokens=limit, on_long_prompt=long)
    return load_prompts(data, form, seed=0, on_leak=data.on_leak, rows=rows, samples=False)[0]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MOST_ROWS", 5)
    monkeypatch.setattr(parquet, "_RECORDS_AT_ONCE", 3)


def text_of(form: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    """What must not be held out: the question of a problem, else everything that is said."""
    said = (one["q"],) if form in PROBLEMS else tuple(turn["content"] for turn in one["good"])
    bad = tuple(turn["content"] for turn in one["bad"]) if form == "pairs of conversations" else ()
    return tuple(" ".join(text.split()) for text in said + bad)


@pytest.mark.parametrize("form", list(FORMS))
def test_prompts_and_draws_are_those_of_jsonl_and_of_sets(form: str, tmp_path: Path) -> None:
    rows, held = made(form, 90, 0), made(form, 6, 1)
    held_out = written(tmp_path / "e.jsonl", held)
    ours, theirs = (loaded(form, written(tmp_path / f"t.{kind}", rows), held_out) for kind in ("parquet", "jsonl"))
    gone, seen, kept = {text_of(form, one) for one in held}, set[tuple[str, ...]](), []
    for number, one in enumerate(rows, 1):
        text = text_of(form, one)
        whole = (*text, *{"answers": (one["good"],), "pairs of answers": (one["good"], one["bad"])}.get(form, ()))
        if text not in gone and whole not in seen:
            kept.append(f"t:{number}")
            seen.add(whole)
    assert 20 < len(kept) < 80
    assert [one.id for one in ours] == kept
    assert list(ours) == list(theirs)
    assert PromptStream(ours, seed=3).next_prompts(200) == PromptStream(theirs, seed=3).next_prompts(200)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("form", ["pairs of conversations", "pairs of answers"])
def test_fields_of_an_object_are_read_as_those_of_the_row(form: str, kind: str, tmp_path: Path) -> None:
    def pool_of(name: str, rows: Sequence[Mapping[str, Any]], fields: Mapping[str, str]) -> PromptPool:
        path = written(tmp_path / f"{name}.{kind}", rows)
        given = {"type": "files", "train": path, "eval": path, "on_leak": "keep", "fields": fields}
        return load(FileRunData.model_validate(given), rows="pairs")

    rows, named = made(form, 20, 0), FORMS[form]
    fields = {key: f"of.{field}" for key, field in named.items()}
    inside = [{"of": one} for one in rows]
    flat, deep = pool_of("flat", rows, named), pool_of("deep", inside, fields)
    assert [(one.text, one.answer, one.rejected) for one in deep] == [(o.text, o.answer, o.rejected) for o in flat]
    assert [one.margin for one in deep] == [one.margin for one in flat] == [float(one["m"]) for one in rows]
    with pytest.raises(DataError, match=r"no field 'of.goood'; .* did you mean 'of.good'"):
        pool_of("bad", inside, fields | {"margin": "of.goood"})


@pytest.mark.parametrize("form", list(FORMS))
def test_a_resume_draws_what_an_uninterrupted_run_draws_and_refuses_other_rows(form: str, tmp_path: Path) -> None:
    rows = made(form, 40, 0, values=10**6)
    path, held_out = written(tmp_path / "t.parquet", rows), written(tmp_path / "e.jsonl", made(form, 1, 5, 10**6))
    whole = PromptStream(loaded(form, path, held_out), seed=3).next_prompts(90)
    first, again = (PromptStream(loaded(form, path, held_out), seed=3) for _ in range(2))
    first.next_prompts(47)
    state = first.state()
    again.restore(state)
    assert again.next_prompts(43) == whole[47:]
    written(path, [*rows[:-1], row(form, "other", "1", "2")])
    with pytest.raises(CheckpointError, match="as many training prompts"):
        PromptStream(loaded(form, path, held_out), seed=3).restore(state)


@pytest.mark.parametrize("form", PROBLEMS)
def test_an_epoch_of_parquet_has_each_row_once_and_counts_those_that_are_too_long(form: str, tmp_path: Path) -> None:
    """A row drawn instead of a long one would be trained on more than once an epoch."""
    pairs, long = form != "answers", [f"{number:040}" for number in range(20)]
    rows = [row(form, asked, "1", "2") for asked in (*long, *map(str, range(20)))]
    paths = {"train": written(tmp_path / "t.parquet", rows), "eval": written(tmp_path / "e.jsonl", made(form, 1, 5))}
    data = FileRunData.model_validate({"type": "files", "on_leak": "drop", **paths, "fields": FORMS[form]})
    job = "dpo" if pairs else "sft"
    config = load_config(f"{job}_tiny", [f"{job}.max_tokens=32", f"{job}.on_long=drop"])
    train = load(data, rows="pairs" if pairs else "answers", limit=32, long="drop")
    drawn = PromptStream(train, seed=0).next_prompts(len(train))
    units: list[Unit] = (
        [*answer_pairs(drawn, byte_tokenizer(), {"": 257})]
        if pairs
        else [(one,) for one in supervised_rows(drawn, answers(drawn, 0), byte_tokenizer(), {"": 257})]
    )
    found = fit_rows(units, config)
    assert sorted(unit[0].id for unit in found.units) == sorted(f"t:{number}" for number in range(21, 41))
    assert found.num_dropped == 20 * (1 + pairs)


def calling(name: str, **arguments: object) -> dict[str, Any]:
    function = {"name": name, "parameters": {"properties": {key: {"type": "string"} for key in arguments}}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    said = [*talk(name, "")[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"good": said, "bad": talk(name, "I cannot"), "tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize("pairs", [False, True])
def test_calls_of_different_functions_have_their_own_arguments_alone(pairs: bool, tmp_path: Path) -> None:
    """Arrow's struct of them has the arguments of all, and those of one's tools: null where a row lacks them."""
    rows = [calling("weather", city="Paris"), calling("search", query=["x", None], limit=3), calling("stop")]
    keys = {"fields": {"messages": "good", "tools": "tools"} | ({"rejected": "bad"} if pairs else {})}
    for kind in ("parquet", "jsonl"):
        path, others = written(tmp_path / f"t.{kind}", rows), [calling("other", a="1")]
        data = {"type": "files", "train": path, "eval": written(tmp_path / f"e.{kind}", others), **keys}
        prompts = load(FileRunData.model_validate(data), rows="pairs" if pairs else "answers")
        assert len(prompts) == 3
        for prompt, one in zip(prompts, rows, strict=True):
            said = {"messages": one["good"], "tools": one["tools"]} | ({"rejected": one["bad"]} if pairs else {})
            assert json.loads(prompt.text) == said


@pytest.mark.parametrize("as_text", [False, True])
def test_null_arguments_of_json_stay(as_text: bool, tmp_path: Path) -> None:
    one = calling("search", limit=None)
    rows = [{name: json.dumps(value) for name, value in one.items()}] if as_text else [one]
    kind = "parquet" if as_text else "jsonl"
    path, held_out = written(tmp_path / f"t.{kind}", rows), written(tmp_path / "e.jsonl", [calling("other")])
    keys = {"type": "files", "train": path, "eval": held_out, "fields": {"messages": "good", "tools": "tools"}}
    (prompt,) = load(FileRunData.model_validate(keys))
    assert json.loads(prompt.text) == {"messages": one["good"], "tools": one["tools"]}


NO_ANSWER = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("form", "bad", "said"),
    [
        ("conversations", {"good": None}, "field 'good' has no message of the role 'assistant'"),
        ("conversations", {"good": NO_ANSWER}, "field 'good' has no message of the role 'assistant'"),
        ("pairs of conversations", {"bad": talk("9", "1"), "good": talk("9", "1")}, "fields 'good' and 'bad' are eq"),
        ("pairs of conversations", {"bad": NO_ANSWER}, "field 'bad' has no message of the role 'assistant'"),
        ("pairs of conversations", {"m": 10_001.0}, "field 'm' is 10001.0; it must be a finite number"),
        ("pairs of answers", {"m": None}, "field 'm' is None; it must be a finite number"),
        ("pairs of answers", {"good": "7", "bad": "7"}, "fields 'good' and 'bad' are equal"),
        ("pairs of answers", {"bad": " "}, "field 'bad' is empty"),
    ],
)
def test_bad_rows_are_named_by_file_and_row(form: str, bad: dict[str, Any], said: str, tmp_path: Path) -> None:
    rows = made(form, 20, 0, values=10**6)
    for number in (9, 17):
        rows[number - 1] |= bad
    held_out = written(tmp_path / "e.jsonl", made(form, 1, 5, 10**6))
    with pytest.raises(DataError) as error:
        loaded(form, written(tmp_path / "t.parquet", rows), held_out)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    for number, line in zip((9, 17), lines, strict=True):
        assert line.startswith(f"{tmp_path}/t.parquet:{number}: {said}")


def test_of_rows_with_text_that_is_not_utf8_each_is_named(tmp_path: Path) -> None:
    rows = made("conversations", 20, 0, values=10**6)
    rows[10]["good"][1]["content"] = "QQQQ"
    path = written(tmp_path / "t.parquet", rows)
    pq.write_table(pq.read_table(path), path, row_group_size=7, compression="none", use_dictionary=False)
    data = path.read_bytes()
    assert data.count(b"QQQQ") <= 3
    path.write_bytes(data.replace(b"QQQQ", b"Q\xff\xffQ"))
    held_out = written(tmp_path / "e.jsonl", made("conversations", 1, 5, 10**6))
    with pytest.raises(DataError, match=r"t\.parquet:11: the row cannot be read: .*utf-8.*0xff") as error:
        loaded("conversations", path, held_out)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_answers_in_columns_of_text_are_compared_as_in_jsonl_without_an_object_a_row(
    kind: pa.DataType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blanks = [chr(code) for code in range(0x3001) if chr(code).isspace()]
    asked = [f"{blank}is {number}{blank}{blank} é?" for number, blank in enumerate(blanks)]
    answered = [f"it{blank} is \0{blank}" for blank in reversed(blanks)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"good": pa.array(answered, kind), "q": pa.array(asked, kind)}), path, row_group_size=7)
    data = FileRunData.model_validate({"type": "files", "train": path, "eval": path, "fields": FORMS["answers"]})
    rows, wanted = FileRows([path], data, "data.train", lists=False), list(map(normalize_whitespace, asked, answered))
    (wholes,) = rows.compared(ANSWERED)
    monkeypatch.setattr(ParquetRows, "_records_of", None)
    assert wholes.hashes().tolist() == hash_texts(wanted).tolist()
    some = np.array([0, 6, 7, len(asked) - 1])
    assert wholes.digests(some).tolist() == digest_texts(wanted[row] for row in some).tolist()


@pytest.mark.parametrize("answers", [[4, 5, 4], [1e-05, 0.5, 1e-05], [[1, 2], [1], [1, 2]]])
def test_answers_that_are_no_text_are_compared_as_in_jsonl(answers: list[Any], tmp_path: Path) -> None:
    rows = [{"q": "how many?", "good": answer} for answer in answers]
    held_out = written(tmp_path / "e.jsonl", made("answers", 1, 5))
    of_parquet, of_json = (
        loaded("answers", written(tmp_path / f"t.{x}", rows), held_out) for x in ("parquet", "jsonl")
    )
    assert list(of_parquet) == list(of_json)
    assert len(of_json) == 2


@pytest.mark.parametrize("name", ["good", "bad", "m"])
def test_a_missing_column_is_told_once_before_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{key: value for key, value in one.items() if key != name} for one in made("pairs of conversations", 9, 0)]
    monkeypatch.setattr(ParquetRows, "_batches", None)
    with pytest.raises(DataError, match=rf"^{tmp_path}/t\.parquet: no field '{name}'; it has "):
        loaded("pairs of conversations", written(tmp_path / "t.parquet", rows), tmp_path / "none.jsonl")


def test_conversations_are_looked_at_in_one_pass_and_pairs_of_answers_are_none(tmp_path: Path) -> None:
    rows = {form: made(form, 40, 0, values=10**6) for form in ("pairs of conversations", "pairs of answers")}
    rows["pairs of conversations"][30] = row("pairs of conversations", "1", "2", "3") | {"bad": talk("2", "3")}
    sources = {
        name: {
            "fields": FORMS[form],
            "type": "files",
            "train": written(tmp_path / f"{name}.parquet", rows[form]),
            "eval": written(tmp_path / f"{name}_e.jsonl", made(form, 1, 5, 10**6)),
        }
        for name, form in (("letters", "pairs of answers"), ("talks", "pairs of conversations"))
    }
    train = load(MixtureData.model_validate({"type": "mixture", "sources": sources, "on_leak": "drop"}), rows="pairs")
    read = list(train.conversations())
    expected = [(one.id, one.source, one.text) for one in train if one.source == "talks"]
    assert [(one.id, one.source, one.text) for one in read] == expected
    assert len(read) == 40
    with pytest.raises(DataError, match=r"^prompt 'talks/talks:31': its conversations first differ in message 1"):
        check_answers(train.conversations())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", ["answers", "conversations"])
def test_an_answer_that_two_people_judged_differently_has_both_labels(form: str, suffix: str, tmp_path: Path) -> None:
    """Of answers with labels, those with the same label are equal, and no others; without labels all are."""
    rows = [{**row(form, asked, "2", "3"), "label": label} for asked, label in (("1", True), ("1", False), ("1", True))]
    train = written(tmp_path / f"t.{suffix}", rows)
    held_out = written(tmp_path / "e.jsonl", [{**row(form, "9", "2", "3"), "label": True}])
    keys = {"type": "files", "train": train, "eval": held_out, "on_leak": "fail", "fields": FORMS[form]}
    kept = load(FileRunData.model_validate(keys), rows="labels")
    assert [(one.id, one.meta["label"]) for one in kept] == [("t:1", True), ("t:2", False)]
    assert [one.id for one in load(FileRunData.model_validate(keys))] == ["t:1"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_parameters_of_tools_may_be_json_text(suffix: str, tmp_path: Path) -> None:
    """No column of Arrow has the schemas of all functions."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
    for number, given in enumerate((json.dumps(schema), "{1", "[]")):
        tools = [
            {"type": "function", "function": {"name": "f", "parameters": given}},
            {"name": "g", "parameters": given},
        ]
        path = written(tmp_path / f"{number}{suffix}", [{"good": talk("1", "2"), "tools": tools}])
        held_out = written(tmp_path / "e.jsonl", [{"good": talk("3", "4"), "tools": None}])
        keys = {"type": "files", "train": path, "eval": held_out, "fields": {"messages": "good", "tools": "tools"}}
        if number:
            with pytest.raises(DataError, match=rf"{number}\{suffix}:1: field 'tools' has a tool of parameters '"):
                load(FileRunData.model_validate(keys))
        else:
            one, other = json.loads(load(FileRunData.model_validate(keys))[0].text)["tools"]
            assert [one["function"]["parameters"], other["parameters"]] == [schema, schema]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("field", ["good", "in.it"])
def test_an_answer_of_messages_is_refused_and_other_lists_are_none(suffix: str, field: str, tmp_path: Path) -> None:
    """As TRL's files with a prompt and a completion have it, and ShareGPT's; it would be learned as JSON."""
    held_out = written(tmp_path / "e.jsonl", [{"q": "9", "good": "9", "in": {"it": "9"}}])
    messages = talk("1", "2")[1:], talk("1", "2")[1], [{"from": "gpt", "value": "2"}]
    for number, good in enumerate((*messages, [{"role": "buyer", "name": "1"}], {"from": "USD", "value": 2})):
        path = written(tmp_path / f"{number}{suffix}", [{"q": "1", "good": good, "in": {"it": good}}])
        keys = {"type": "files", "train": path, "eval": held_out, "fields": {"prompt": "q", "answer": field}}
        if number >= len(messages):
            assert load(FileRunData.model_validate(keys))[0].answer == json.dumps(good)
        else:
            said = rf"{number}\{suffix}:1: field '{field}' is .*; an answer is a text. If it is a con"
            with pytest.raises(DataError, match=said):
                load(FileRunData.model_validate(keys))
