"""Parquet by row groups: the prompts, draws and verdicts of the same rows in jsonl; columns, objects and refusals."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import random
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import CurriculumSection, FileRunData, MixtureData, RunKeys
from rl_megatron.data.problems import parquet, pool, rendering
from rl_megatron.data.problems.parquet import ParquetRows
from rl_megatron.data.problems.pool import PromptPool, PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.data.problems.rows import as_json, column_values
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from tests.data_files import written
from tests.streams import Source, stream_over

SPACES = (" ", "  ", "\t", "\n", "\u3000", "\x1c", "\xa0")


def made(count: int, seed: int = 0, values: int = 60) -> list[dict[str, Any]]:
    """Rows of which some differ in white space alone."""
    draw = random.Random(seed)
    return [
        {
            "question": f"{draw.choice(('', ' '))}{draw.randrange(values)}{draw.choice(SPACES)}+ é?",
            "answer": draw.choice((draw.randrange(9), draw.randrange(9))),
            "level": row / count,
        }
        for row in range(count)
    ]


def loaded(
    train: Path, held_out: Path, leak: str = "drop", limit: int = 99, long: Any = "fail", **keys: Any
) -> PromptPool:
    data = {"type": "files", "train": train, "eval": held_out, "on_leak": leak, **keys}
    return load(FileRunData.model_validate(data), limit, long)


def load(data: Any, limit: int = 99, long: Any = "fail") -> PromptPool:
    assert isinstance(data, RunKeys)
    form = RowForm(tokenizer=byte_tokenizer(), max_tokens=limit, on_long_prompt=long)
    return load_prompts(data, form, seed=0, on_leak=data.on_leak)[0]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MOST_ROWS", 5)


@pytest.mark.parametrize("leak", ["drop", "keep", "fail"])
def test_prompts_draws_and_verdicts_are_those_of_jsonl_and_of_sets(leak: str, tmp_path: Path) -> None:
    rows, held = made(100), made(8, seed=1, values=90)
    held_out = written(tmp_path / "e.jsonl", held)
    files = [written(tmp_path / f"t.{kind}", rows) for kind in ("jsonl", "parquet")]
    if leak == "fail":
        said = []
        for path in files:
            with pytest.raises(DataError) as error:
                loaded(path, held_out, leak)
            said.append(str(error.value).replace(path.name, "t"))
        assert said[0] == said[1]
        return
    asked = {" ".join(row["question"].split()) for row in held if leak == "drop"}
    seen, kept = set[tuple[str, str]](), []
    for number, row in enumerate(rows, 1):
        text = " ".join(row["question"].split()), row["answer"]
        if text not in seen and text[0] not in asked:
            kept.append(f"t:{number}")
        seen.add(text)
    ours, theirs = (loaded(path, held_out, leak) for path in files)
    assert [one.id for one in ours] == kept
    assert list(ours) == list(theirs)
    count = 3 * len(kept) + 4
    drawn = PromptStream(theirs, seed=3).next_prompts(count)
    assert drawn == PromptStream(ours, seed=3).next_prompts(count)
    assert [theirs.find_row(one.id) for one in drawn] == [kept.index(one.id) for one in drawn]


@pytest.mark.parametrize("taken", [0, 1, 6, 37, 60])
def test_a_resume_draws_what_an_uninterrupted_run_draws(taken: int, tmp_path: Path) -> None:
    path, held_out = written(tmp_path / "t.parquet", made(40)), written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    curriculum = CurriculumSection(retire_above=0.9)
    whole = PromptStream(loaded(path, held_out), seed=3, curriculum=curriculum).next_prompts(taken + 50)
    first = PromptStream(loaded(path, held_out), seed=3, curriculum=curriculum)
    first.next_prompts(taken)
    assert first.table is not None
    again = PromptStream(loaded(path, held_out), seed=3, curriculum=curriculum)
    again.restore(first.state())
    assert again.table is not None
    again.table.restore(first.table.state())
    assert again.next_prompts(50) == whole[taken:]


def test_another_file_of_as_many_rows_is_refused_on_a_resume(tmp_path: Path) -> None:
    rows, held_out = made(20, values=10**6), written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    for name in ("t.parquet", "t.jsonl"):
        state = PromptStream(loaded(written(tmp_path / name, rows), held_out), seed=0).state()
        other = loaded(written(tmp_path / name, [*rows[:-1], rows[-1] | {"answer": 77}]), held_out)
        with pytest.raises(CheckpointError, match="as many training prompts"):
            PromptStream(other, seed=0).restore(state)


def test_a_file_that_changes_while_it_is_read_ends_the_run(tmp_path: Path) -> None:
    path, held_out = written(tmp_path / "t.parquet", made(40)), written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    train = loaded(path, held_out)
    written(path, made(41))
    with pytest.raises(DataError, match="has changed since the run began to read it"):
        PromptStream(train, seed=0).next_prompts(1)


def test_a_folder_has_the_rows_of_its_files_by_name(tmp_path: Path) -> None:
    rows, held_out = made(30, values=10**6), written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    folder = tmp_path / "many"
    folder.mkdir()
    for name, start in (("b", 10), ("a", 0), ("c", 25)):
        written(folder / f"{name}.parquet", rows[start : {"a": 10, "b": 25, "c": 30}[name]])
    train = loaded(folder, held_out)
    assert [one.text for one in train] == [row["question"] for row in rows]
    assert [train[row].id for row in (0, 10, 29)] == ["a:1", "b:1", "c:5"]
    assert [train.find_row(one.id) for one in train] == list(range(30))
    with pytest.raises(DataError, match=r"data.train=.*: the folder has no .parquet file"):
        loaded(tmp_path, held_out)


def test_a_prompts_row_is_found_without_a_copy_of_all_rows(tmp_path: Path) -> None:
    """Each prompt of a step is looked up, on the event loop."""
    count = 50_000
    table = pa.table({"question": list(map(str, range(count))), "answer": ["1"] * count})
    pq.write_table(table, tmp_path / "t.parquet")
    train = loaded(tmp_path / "t.parquet", written(tmp_path / "e.jsonl", [{"question": "7", "answer": "1"}]))
    assert train.find_row(train.prompt_id(3)) == 3
    tracemalloc.start()
    try:
        assert train.find_row(train.prompt_id(40_000)) == 40_000
        assert tracemalloc.get_traced_memory()[1] < count  # bytes
    finally:
        tracemalloc.stop()


def test_a_text_that_many_rows_have_counts_in_each_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has it once, and memory for each row. What later rows have is learned on the way."""
    monkeypatch.setattr(parquet, "_BATCH_BYTES", most := 1 << 18)
    groups, size = 4, 1024
    longer = np.zeros((groups, size), np.int32)
    longer[1:, 100:] = 1
    tools = pa.DictionaryArray.from_arrays(longer.ravel(), ["long " * 200, "longer " * 2000])
    texts, path = list(map(str, range(groups * size))), tmp_path / "t.parquet"
    table = pa.table({"question": texts, "answer": texts, "tools": tools})
    pq.write_table(table, path, row_group_size=size, store_schema=False)
    assert path.stat().st_size < most
    rows = ParquetRows([path], ("question", "answer"), "data.train")
    assert 1000 <= rows.row_bytes < 1100
    sizes = [batch.nbytes for batch in rows.selected(np.arange(size), None)]
    assert sum(sizes) > size * 1000
    assert max(sizes) <= most
    for _ in range(2):
        sizes = [batch.nbytes for batch in rows.selected(np.arange(size, groups * size), None)]
    assert 9_000 < rows.row_bytes < 11_000
    assert max(sizes) <= 2 * most


def test_a_row_that_is_larger_than_all_others_leaves_batches_as_they_are(tmp_path: Path) -> None:
    texts = [*map(str, range(4000)), "long " * 5_000_000]
    pq.write_table(pa.table({"question": texts, "answer": texts}), tmp_path / "t.parquet", row_group_size=1000)
    rows = ParquetRows([tmp_path / "t.parquet"], ("question", "answer"), "data.train")
    for _ in range(5):
        counts = [len(batch) for batch in rows.selected(np.arange(len(texts)), None)]
    assert counts[:4] == [1000] * 4


def test_it_is_a_source_of_a_mixture(tmp_path: Path) -> None:
    def mixed(kind: str) -> PromptPool:
        folder = tmp_path / kind
        folder.mkdir()
        source = {"type": "files", "eval": written(folder / "e.jsonl", made(1, 5, 10**6))}
        sources = {
            "one": {**source, "train": written(folder / f"one.{kind}", made(20))},
            "sums": {"type": "arithmetic", "digits": 1, "num_eval": 5},
            "two": {**source, "train": written(folder / f"two.{kind}", made(30, seed=2)), "weight": 2},
        }
        return load(MixtureData.model_validate({"type": "mixture", "sources": sources, "on_leak": "drop"}))

    weights = {"one": 1.0, "sums": 1.0, "two": 2.0}
    ours, theirs = (PromptStream(mixed(kind), seed=1, weights=weights) for kind in ("jsonl", "parquet"))
    assert theirs.next_prompts(90) == ours.next_prompts(90)
    state, after = theirs.state(), theirs.next_prompts(30)
    (tmp_path / "more").mkdir()
    again = PromptStream(mixed_again(tmp_path), seed=1, weights=weights)
    again.restore(state)
    assert again.next_prompts(30) == after


@pytest.mark.parametrize("taken", [0, 7, 40])
def test_after_reading_ahead_no_draw_reads_files(taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads in the event loop's thread would block it for minutes."""
    monkeypatch.setattr(pool, "_MOST_ROWS", 50)
    train = written(tmp_path / "t.parquet", made(40, values=10**6))
    held_out = written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    whole = PromptStream(loaded(train, held_out), seed=3)
    expected, state = whole.next_prompts(taken + 5), whole.state()
    stream = PromptStream(loaded(train, held_out), seed=3)
    stream.next_prompts(taken)
    before = PromptStream(loaded(train, held_out), seed=3)
    if taken:
        before.restore(stream.state())
    before.read_ahead()
    monkeypatch.setattr(ParquetRows, "selected", None)
    monkeypatch.setattr(ParquetRows, "checksum", None)
    assert before.next_prompts(5) == expected[taken:]
    assert before.state() == state


@pytest.mark.parametrize("curriculum", [None, CurriculumSection(retire_above=0.9)])
def test_no_draw_reads_files_in_its_own_thread(
    curriculum: CurriculumSection | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at an epoch's end nor where rows are passed over: it would block the event loop."""
    monkeypatch.setattr(pool, "_MOST_ROWS", 60)
    readers, selected = list[bool](), ParquetRows.selected

    def noted(rows: ParquetRows, *given: Any) -> Any:
        readers.append(threading.current_thread() is threading.main_thread())
        return selected(rows, *given)

    monkeypatch.setattr(ParquetRows, "selected", noted)
    rows, held_out = made(200, values=10**6), written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    ours, theirs = (
        PromptStream(loaded(written(tmp_path / f"t.{kind}", rows, 50), held_out), seed=3, curriculum=curriculum)
        for kind in ("jsonl", "parquet")
    )
    theirs.read_ahead()
    readers.clear()
    assert theirs.next_prompts(700) == ours.next_prompts(700)
    assert len(readers) > 10
    assert not any(readers)


@pytest.mark.parametrize(("large", "windows"), [(1 << 20, 16), (1 << 15, 250), (1, 1000)])
def test_wide_rows_need_few_windows(large: int, windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads every row group. Rows are of 4 KiB, and two are in a window in any case."""
    for name, value in (("_MOST_ROWS", 10**6), ("_WINDOW_BYTES", 1 << 13), ("_LARGE_WINDOW_BYTES", large)):
        monkeypatch.setattr(pool, name, value)
    rows = [{"question": str(row), "answer": "1" * 3900} for row in range(2000)]
    train = loaded(written(tmp_path / "t.parquet", rows, 500), written(tmp_path / "e.jsonl", made(1, 5, 10**6)))
    sizes, selected = list[int](), ParquetRows.selected

    def noted(files: ParquetRows, numbers: Any, columns: Any) -> Any:
        sizes.append(len(numbers))
        return selected(files, numbers, columns)

    monkeypatch.setattr(ParquetRows, "selected", noted)
    PromptStream(train, seed=0).next_prompts(len(rows) // 10)
    assert set(sizes) == {len(rows) // windows}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_of_what_is_held_out_no_more_is_read_than_is_used(kind: str, tmp_path: Path) -> None:
    train = written(tmp_path / "t.parquet", made(3, 5, 10**6))
    held_out = written(tmp_path / f"e.{kind}", [*made(4, 6, 10**6), {"question": None, "answer": 1, "level": 0.0}])
    keys = {"type": "files", "train": train, "eval": held_out, "on_leak": "drop"}
    load(RunConfig.model_validate({"data": {**keys, "max_eval": 4}}).data)
    with pytest.raises(DataError, match=f"e.{kind}:5"):
        load(RunConfig.model_validate({"data": {**keys, "max_eval": 5}}).data)


def mixed_again(folder: Path) -> PromptPool:
    """The parquet mixture of the test above, loaded again."""
    source = {"type": "files", "eval": folder / "parquet/e.jsonl"}
    sources = {
        "one": {**source, "train": folder / "parquet/one.parquet"},
        "sums": {"type": "arithmetic", "digits": 1, "num_eval": 5},
        "two": {**source, "train": folder / "parquet/two.parquet", "weight": 2},
    }
    return load(MixtureData.model_validate({"type": "mixture", "sources": sources, "on_leak": "drop"}))


def test_long_prompts_are_dropped_when_they_are_drawn_or_end_the_run(tmp_path: Path) -> None:
    rows = [{"question": "x" * size, "answer": "1"} for size in range(1, 21)]
    path, held_out = written(tmp_path / "t.parquet", rows), written(tmp_path / "e.jsonl", made(1))
    stream = PromptStream(loaded(path, held_out, limit=15, long="drop"), seed=0)
    assert sorted(len(one.text) for one in stream.next_prompts(15)) == list(range(1, 16))
    with pytest.raises(DataError, match=r"t\.parquet:\d+: the prompt has \d+ tokens, rollout.max_prompt_tokens=15"):
        PromptStream(loaded(path, held_out, limit=15), seed=0).next_prompts(20)


@pytest.mark.parametrize(
    ("question", "answer", "said"),
    [
        (None, "1", "t.parquet:9: field 'question' is None"),
        (" \n", "1", "t.parquet:9: field 'question' is empty"),
        ("a", None, "t.parquet:9: field 'answer' is None"),
        ("a", "\u3000", "t.parquet:9: field 'answer' is empty"),
    ],
)
def test_a_bad_row_is_named_with_its_row_group(question: Any, answer: Any, said: str, tmp_path: Path) -> None:
    rows = [{"question": f"{i}", "answer": "1"} for i in range(20)]
    rows[8] = {"question": question, "answer": answer}
    path, held_out = written(tmp_path / "t.parquet", rows), written(tmp_path / "e.jsonl", made(1))
    with pytest.raises(DataError) as error:
        loaded(path, held_out)
    assert said in str(error.value)
    assert str(error.value).endswith("(row group 2)")


@pytest.mark.parametrize("bad", [None, " ", b"\xff"])
def test_many_bad_rows_are_named_together(bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row at a time took 21 s for 50,000 of them."""
    count, converted, values_of = 2500, list[int](), parquet.column_values
    given = pa.array([bad if row % 2 else f"{row}?" for row in range(count)], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), count, given.buffers())
    table = pa.table({"question": texts, "answer": ["1"] * count})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1250)
    rows = ParquetRows([tmp_path / "a.parquet"], ("question", "answer"), "data.train")
    monkeypatch.setattr(parquet, "column_values", lambda column: converted.append(len(column)) or values_of(column))
    monkeypatch.setattr(parquet, "listed", "\n".join)
    with pytest.raises(DataError) as told:
        rows.hashes()
    said = str(told.value).splitlines()
    assert [line.split(":")[1] for line in said] == [str(row + 1) for row in range(count) if row % 2]
    assert [line.endswith("(row group 1)") for line in said] == [row < 1250 for row in range(count) if row % 2]
    assert len(converted) <= 2 * 2 * 2  # columns of at most two parts of each group


def test_a_row_group_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path, held_out = written(tmp_path / "t.parquet", made(40)), written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"t\.parquet: row group 3 \(rows 15 to 21\): cannot be read"):
        loaded(path, held_out)


def test_numbers_of_32_bits_are_answers_as_they_were_written(tmp_path: Path) -> None:
    held_out = written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    columns = {"question": ["a", "b"], "answer": pa.array([0.1, 1e-5], pa.float32())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    train = loaded(tmp_path / "t.parquet", held_out)
    assert [one.answer for one in train] == ["0.1", "0.00001"]


def test_any_prompt_of_a_mixture_is_read_by_its_row(tmp_path: Path) -> None:
    """As a resume does with those that wait; also of a source's last rows, behind which are another's."""
    held_out, parts = written(tmp_path / "e.jsonl", made(2, seed=1, values=90)), [made(13), made(11, seed=5)]

    def mixed(kind: str) -> PromptPool:
        files = [written(tmp_path / f"{name}.{kind}", part) for name, part in zip("ab", parts, strict=True)]
        sources = {one.stem: {"type": "files", "train": one, "eval": held_out} for one in files}
        keys = {"type": "mixture", "sources": sources, "on_leak": "keep"}
        return load(RunConfig.model_validate({"data": keys}).data)

    of_json, of_parquet = mixed("jsonl"), mixed("parquet")
    assert of_parquet[:] == of_json[:]
    for row in reversed(range(len(of_json))):
        assert of_parquet[row] == of_json[row]


# Question and answer within objects of parquet files.
def test_columns_of_a_struct_are_read_and_compared_as_others(tmp_path: Path) -> None:
    """Question and answer within an object; null where the whole object is."""
    rows = [{**row, "answer": str(row["answer"])} for row in made(60)]
    within = [{"of": row, "level": row["level"]} for row in rows]
    plain, nested = written(tmp_path / "p" / "t.parquet", rows), written(tmp_path / "n" / "t.parquet", within)
    fields = {"plain": ("question", "answer"), "nested": ("of.question", "of.answer")}
    ours, theirs = (ParquetRows([p], fields[name], "data.train") for name, p in (("plain", plain), ("nested", nested)))
    assert theirs.are_texts()
    for texts in (1, 2):
        assert np.array_equal(ours.hashes(texts), theirs.hashes(texts))
        assert np.array_equal(ours.digests(np.arange(60), texts), theirs.digests(np.arange(60), texts))
    lacking = written(tmp_path / "l" / "t.parquet", [within[0], {"of": None, "level": 0.5}])
    with pytest.raises(DataError, match=r"t.parquet:2: field 'of.question' is None .* \(row group 1\)"):
        ParquetRows([lacking], fields["nested"], "data.train").hashes()
    assert not ParquetRows([nested], ("of.question", "level"), "data.train").are_texts()
    with pytest.raises(DataError, match=r"no field 'of.answr'; it has level, of.answer, .* did you mean 'of.answer'"):
        ParquetRows([nested], ("of.question", "of.answr"), "data.train")


BYTES = {
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "of three": pa.binary(3),
    "dictionary": pa.dictionary(pa.int32(), pa.binary()),
}


def in_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes where it has text."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, in_bytes(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(in_bytes(kind.value_type))
    return pa.binary() if pa.types.is_string(kind) else kind


def as_bytes(value: Any) -> Any:
    """The value with bytes for text."""
    if isinstance(value, dict):
        return {name: as_bytes(one) for name, one in value.items()}
    return (
        list(map(as_bytes, value)) if isinstance(value, list) else value.encode() if isinstance(value, str) else value
    )


@pytest.mark.parametrize("kind", BYTES)
def test_text_in_a_column_of_bytes_is_read_as_text(kind: str, tmp_path: Path) -> None:
    """As Impala, Hive and older Spark write it: in training and held-out files, also in fields that no key names."""
    names, texts = ("question", "answer", "bad", "level"), ["1+1", "2+2", "3+3", "4+4"]
    for name, type_ in (("bytes", BYTES[kind]), ("text", pa.string())):
        for split, part in (("t", texts[:2]), ("e", texts[2:])):
            column = pa.array([text.encode() for text in part]).cast(type_)
            path = tmp_path / name / f"{split}.parquet"
            path.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table(dict.fromkeys(names, column)), path)
    both = []
    for folder in (tmp_path / "bytes", tmp_path / "text"):
        data = FileRunData(type="files", train=folder / "t.parquet", eval=folder / "e.parquet")
        both.append(
            load_prompts(data, RowForm(tokenizer=byte_tokenizer(), max_tokens=99, on_long_prompt="fail"), seed=0)
        )
    (ours, held), (theirs, held_text) = both
    assert list(ours) == list(theirs)
    assert held == held_text
    assert [(one.text, one.answer, one.meta["level"]) for one in ours] == [(text,) * 3 for text in texts[:2]]


@pytest.mark.parametrize(
    "keys",
    [
        {"fields": {"prompt": "of.asked", "answer": "of.answers", "system": "says"}, "chat_template": True},
        {"fields": {"messages": "talk", "tools": "tools", "system": "says"}},
        {"fields": {"prompt": "chat", "answer": "says"}, "chat_template": True},
    ],
)
def test_text_of_bytes_in_lists_and_structs_is_read_as_text(keys: dict[str, Any], tmp_path: Path) -> None:
    asks, says = {"role": "user", "content": "1?"}, {"role": "assistant", "content": "é"}
    tool = {"type": "function", "function": {"name": "f", "parameters": "{}"}}
    row: dict[str, Any] = {"of": {"asked": "1?", "answers": ["2", "3"]}, "talk": [asks, says], "chat": [asks]}
    row |= {"tools": [tool], "says": "s"}
    table = pa.Table.from_pylist([row])
    schema = pa.schema([(field.name, in_bytes(field.type)) for field in table.schema])
    pq.write_table(table, tmp_path / "text.parquet")
    pq.write_table(pa.Table.from_pylist([as_bytes(row)], schema), tmp_path / "bytes.parquet")
    (theirs,), (ours,) = (
        loaded(tmp_path / f"{name}.parquet", tmp_path / f"{name}.parquet", "keep", **keys) for name in ("text", "bytes")
    )
    assert replace(ours, id=theirs.id) == theirs


@pytest.mark.parametrize("bad", [b"\xff\xd8", "4".encode("utf-16-le")])
@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ("question", {}),
        ("answer", {}),
        ("bad", {"fields": {"rejected": "bad"}}),
        ("system", {"fields": {"system": "system"}, "chat_template": True}),
        ("shown", {"fields": {"demonstration": "shown"}}),
        ("talk", {"fields": {"messages": "talk"}}),
        ("chat", {"fields": {"prompt": "chat"}, "chat_template": True}),
    ],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_bytes_that_are_no_text_are_refused_by_column_and_row(
    bad: bytes, field: str, keys: dict[str, Any], split: str, tmp_path: Path
) -> None:
    """Where a key names their column; a picture is not text."""

    def row(at: int, value: bytes) -> dict[str, Any]:
        texts = {name: f"{name} {at}".encode() for name in ("question", "answer", "bad", "system", "shown")}
        talks = {name: [{"role": role, "content": b"."}] for name, role in (("talk", "assistant"), ("chat", "user"))}
        one = {**texts, **talks, "picture": b"\xff"}
        return one | {field: [{**one[field][0], "content": value}] if field in talks else value}

    files = {name: [row(at, b"7") for at in range(2)] for name in ("train", "eval")}
    files[split].append(row(2, bad))
    train, held_out = (written(tmp_path / f"{name}.parquet", rows) for name, rows in files.items())
    if (field, split) == ("shown", "eval"):  # held-out rows need none
        assert len(loaded(train, held_out, "keep", **keys)) == 2
        return
    said = f"{split}.parquet:3: field '{field}' has bytes that are not UTF-8 text; write the column as text"
    with pytest.raises(DataError, match=said):
        loaded(train, held_out, "keep", **keys)


# Values of parquet columns as Python objects, beside pyarrow's own of the same columns.
LEAVES: tuple[tuple[pa.DataType, tuple[Any, ...]], ...] = (
    (pa.string(), ("", "a b", "\u20ac\n")),
    (pa.large_string(), ("x",)),
    (pa.dictionary(pa.int8(), pa.string()), ("user", "assistant")),
    (pa.int64(), (-(2**63), 0, 7)),
    (pa.uint64(), (2**64 - 1,)),
    (pa.bool_(), (True, False)),
    (pa.float64(), (1.5, float("nan"), float("inf"), -0.0)),
    (pa.binary(), (b"\xff\x00", b"")),
    (pa.timestamp("us"), (datetime.datetime(2026, 11, 25, 1, 2, 3, 4),)),
    (pa.decimal128(10, 2), (decimal.Decimal("1.20"),)),
    (pa.null(), (None,)),
)


def drawn(draw: random.Random, depth: int) -> tuple[pa.DataType, Any]:
    """A type, and a function that draws a value of it."""
    kind = draw.choice(["leaf", "list", "large", "fixed", "struct", "map"]) if depth else "leaf"
    if kind == "leaf":
        leaf, values = draw.choice(LEAVES)
        return leaf, lambda: draw.choice([None, *values])
    if kind == "struct":
        fields = {
            name: drawn(draw, depth - 1) for name in draw.sample(["role", "content", "a", "b"], draw.randrange(4))
        }
        of = pa.struct([(name, one) for name, (one, _) in fields.items()])
        return of, lambda: draw.choice([None, *[{name: value() for name, (_, value) in fields.items()}] * 4])
    inner, value = drawn(draw, depth - 1)
    if kind == "map":
        return pa.map_(pa.string(), inner), lambda: draw.choice([None, [("k", value()), ("l", value())]])
    many = {"list": pa.list_, "large": pa.large_list, "fixed": lambda one: pa.list_(one, 2)}[kind]
    return many(inner), lambda: draw.choice(
        [None, *[[value() for _ in range(2 if kind == "fixed" else draw.randrange(4))]] * 4]
    )


@pytest.mark.parametrize("seed", range(150))
def test_values_are_those_that_pyarrow_makes_one_by_one(seed: int) -> None:
    kind, value = drawn(random.Random(seed), 3)
    column = pa.array([value() for _ in range(40)], kind)
    for part in (column, column.slice(3, 20), column.slice(7).slice(2, 9), column.slice(40)):
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            assert repr(column_values(part)) == repr([as_json(one) for one in part.to_pylist()])


@pytest.mark.parametrize(
    ("kind", "fits", "text", "beyond", "its_text"),
    [
        (pa.timestamp("ns"), 10**9, "1970-01-01 00:00:01", 10**9 + 1, "1970-01-01 00:00:01.000000001"),
        (pa.timestamp("s"), 1, "1970-01-01 00:00:01", 253_402_300_800, "10000-01-01 00:00:00"),
        (pa.date32(), 1, "1970-01-02", 2_932_897, "10000-01-01"),
        (pa.time64("ns"), 1000, "00:00:00.000001", 1, "00:00:00.000000001"),
        (pa.duration("ns"), 10**9, "0:00:01", 1, "1"),
    ],
)
def test_dates_that_python_lacks_are_text(kind: pa.DataType, fits: int, text: str, beyond: int, its_text: str) -> None:
    column = pa.array([fits, None, beyond], pa.int64() if kind != pa.date32() else pa.int32()).cast(kind)
    wanted = [text, None, its_text]
    assert column_values(column) == wanted
    ends = pa.array([0, 3, 3], pa.int32())
    assert column_values(pa.ListArray.from_arrays(ends, column)) == [wanted, []]
    keys, pairs = pa.array(["a", "b", "c"]), [["a", text], ["b", None], ["c", its_text]]
    assert column_values(pa.MapArray.from_arrays(ends, keys, column)) == [pairs, []]
    assert column_values(pa.FixedSizeListArray.from_arrays(column, 3)) == [wanted]
    assert column_values(pa.StructArray.from_arrays([column], ["at"])) == [{"at": one} for one in wanted]
    assert column_values(column.dictionary_encode()) == wanted


@pytest.mark.parametrize(("kind", "type_"), [(pa.float16(), np.float16), (pa.float32(), np.float32)])
def test_floats_of_fewer_bits_are_their_shortest_decimals(kind: pa.DataType, type_: type[np.floating[Any]]) -> None:
    """Whole numbers are what the column holds: its text has fewer digits, 16380 for 16384."""
    numbers = [0.1, 3.14, -0.0, 1e-5, 2.0**14, 1 / 3, float("inf"), float("nan"), None]
    column = pa.array([None if one is None else type_(one) for one in numbers], kind)
    wanted = [0.1, 3.14, -0.0, 1e-5, 2.0**14, float(str(type_(1 / 3))), None, None, None]
    assert repr(column_values(column)) == repr(wanted)
    assert repr(column_values(pa.FixedSizeListArray.from_arrays(column, 3))) == repr(
        [wanted[:3], wanted[3:6], wanted[6:]]
    )


def test_values_of_columns_by_hand() -> None:
    assert column_values(pa.array(["a", None])) == [b"a", None]
    assert column_values(pa.array([["a"], None])) == [["a"], None]
    # Their buffers hold values all the same, and those of other lists follow.
    texts = pa.array(["a", "b", "c", "d"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), texts, mask=pa.array([False, True, False]))
    assert column_values(lists) == lists.to_pylist() == [["a"], None, ["d"]]
    structs = pa.StructArray.from_arrays([texts], ["x"], mask=pa.array([True, False, True, False]))
    assert column_values(structs) == structs.to_pylist() == [None, {"x": "b"}, None, {"x": "d"}]
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    bad = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([b"\xff"]).view(pa.string()))
    for column, said in ((twice, "duplicate field names"), (bad, "can't decode byte 0xff")):
        for read in (pa.Array.to_pylist, column_values):
            with pytest.raises(ValueError, match=said):
                read(column)
    assert column_values(pa.array([], pa.list_(pa.int64()))) == []


@pytest.mark.parametrize("served", [True, False])
def test_a_stream_renders_rows_in_another_thread(served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template may take 5 s of a processor, in which nothing else of the controller would go on."""
    rendered, threads = rendering.tokenize_one, list[threading.Thread]()

    def tokenized_one(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return rendered(*given, **named)

    monkeypatch.setattr(pool, "tokenize_one", tokenized_one)
    train = written(tmp_path / "t.parquet", made(40, values=10**6))
    held_out = written(tmp_path / "e.jsonl", made(1, 5, 10**6))
    prompts, wanted = loaded(train, held_out), PromptStream(loaded(train, held_out), seed=0).next_prompts(12)
    threads.clear()

    async def run() -> list[str]:
        stream = stream_over(Source(lambda _: 0.0), size=4, staleness=1, last_step=3, served=served, prompts=prompts)
        await asyncio.to_thread(stream._prompts.read_ahead)
        found = []
        for step in range(1, 4):
            found += [place.drawn.prompt for place in (await stream.take(step)).places]
            await stream.wait_until_pushable()
            stream.on_push(step)
        await stream.close()
        return [one.id for one in found]

    assert sorted(asyncio.run(run())) == sorted(one.id for one in wanted)
    assert len(threads) >= 12
    assert threading.main_thread() not in threads
