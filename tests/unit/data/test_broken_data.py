"""Torn, flipped and odd data files: each is read, or gives a short error that says what is wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from rl_megatron.columns import ColumnWriter
from rl_megatron.data.problems.files import read_records
from rl_megatron.errors import DataError
from rl_megatron.rollout.batch import Drawn, LedgerState, Waiting
from rl_megatron.rollout.stream import StreamState
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.types import Prompt

FIELDS = ("question", "answer")


def said(path: Path) -> str:
    """What is said of the file, which is never long; nothing where it is read."""
    text = ""
    try:
        read_records(path, FIELDS, key="data.train")
    except DataError as error:
        text = str(error)
    assert len(text) < 10_000
    return text


def whole(path: Path) -> bytes:
    rows = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(40)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert said(path) == ""
    return path.read_bytes()


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_the_deepest_row_that_is_read_can_be_read_from_a_checkpoint(opening: str, tmp_path: Path) -> None:
    """Else a run would write checkpoints that no resume can read. Lists beside each other do not count."""
    deep = {levels: opening * levels + "1" + {"[": "]"}.get(opening, "}") * levels for levels in (127, 128)}
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"question": "a", "answer": "1", "deep": {one}}}\n' for one in deep.values()))
    assert said(path) == f"{path}:2: nested too deep: it has more than 128 lists and objects in each other"
    path.write_text(f'{{"question": "a", "answer": "1", "deep": {deep[127]}, "wide": [{"[], " * 500}[]]}}\n')
    (record,) = read_records(path, FIELDS, key="data.train")
    prompt = Prompt(id="x:1", text="a", token_ids=(1,), answer="1", meta=record.others)
    waiting = Waiting(drawn=Drawn(ordinal=0, prompt=prompt, batch=1), birth=0, due=1)
    counts = dict.fromkeys(("version", "drawn", "opened", "credit", "ahead", "calm"), 0)
    stream = StreamState(**counts, batch=(), places=(waiting,), left_out=(), ledger=LedgerState())
    states = TypeAdapter(TrainerState)
    text = states.dump_json(TrainerState(step=1, prompts={"epoch": 0}, stream=stream), context=ColumnWriter())
    read = states.validate_json(text).stream
    assert read is not None
    assert read.places[0].drawn.prompt == prompt


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_torn_file_is_told_or_read(name: str, tmp_path: Path) -> None:
    path, draw = tmp_path / name, random.Random(7)
    data = whole(path)
    for _ in range(150):
        at = draw.randrange(len(data))
        flipped = bytearray(data)
        flipped[at] ^= 1 << draw.randrange(8)
        for content in (data[:at], bytes(flipped), bytes(flipped[:at]) + draw.randbytes(8) + data[at + 8 :]):
            path.write_bytes(content)
            said(path)


@pytest.mark.parametrize(
    "line",
    [
        *(
            "[1]",
            "null",
            "7" * 5000,
            "[" * 100_000,
            '{"question": {"a": 1}, "answer": "b"}',
            '{"' + "k" * 50_000 + '": 1}',
        ),
        *('{"question": "\\ud800", "answer": "b"}', '{"question": "a", "answer": NaN}', "\x00", "{}"),
        json.dumps({f"field {i} {'x' * 50}": i for i in range(5000)}),
    ],
)
def test_a_line_that_is_no_row_is_named_in_few_words(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"question": "a", "answer": "b"}}\n{line}\n')
    assert said(path).startswith(f"{path}:2: ")


def columns(*names: str) -> Any:
    return pa.table([pa.array(["a", "b"])] * len(names), names=names)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(columns("question", "answer", "answer"), tmp_path / "x.parquet")
    assert "2 columns are called 'answer'; keep one of them" in said(tmp_path / "x.parquet")


def test_many_columns_are_not_all_listed(tmp_path: Path) -> None:
    pq.write_table(columns("question", *(f"column {i}" for i in range(2000))), tmp_path / "x.parquet")
    assert len(said(tmp_path / "x.parquet")) < 1000


def test_a_name_that_no_file_can_have_is_told(tmp_path: Path) -> None:
    assert "cannot be read: File name too long" in said(tmp_path / f"{'x' * 300}.jsonl")
    assert "no such file" in said(tmp_path / "a\0b.jsonl")
    assert "unknown extension" in said(tmp_path / f"x.{'y' * 9000}")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    assert "no such file" in said(tmp_path / "x.jsonl")
