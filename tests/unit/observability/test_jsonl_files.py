"""Durability of the run's JSON lines: torn tails, resumes, faults that name the line."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.errors import DataError
from rl_megatron.observability.files import JsonlFile, from_the_end, read_jsonl, rows_from


def test_rows_are_read_back_in_order_and_floats_to_the_bit(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    rows = [
        {"step": 1, "loss": 0.1 + 0.2, "phase": "rl"},
        {"step": 2, "loss": None},
        {"step": 3, "text": "a\n\ud800<é>"},
    ]
    file.append(rows[:2])
    file.append(rows[2:])
    assert read_jsonl(file.path) == rows


@pytest.mark.parametrize("cut", range(1, len('{"step": 3}\n')))
def test_a_torn_last_line_is_left_out_and_removed_wherever_it_was_cut(tmp_path: Path, cut: int) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    file.append([{"step": 1}, {"step": 2}, {"step": 3}])
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-cut])
    assert [row["step"] for row in read_jsonl(file.path)] == [1, 2]
    file.truncate_after(2)
    file.append([{"step": 3}])
    assert file.path.read_bytes() == whole


@pytest.mark.parametrize("torn", ["", '{"step": 9'])
@pytest.mark.parametrize("lengths", [[], [1], [3, 1, 2], [70_000, 5, 200_000, 65_536, 65_500], [10] * 9000])
def test_rows_from_the_end_are_the_rows(tmp_path: Path, lengths: list[int], torn: str) -> None:
    path = tmp_path / "m.jsonl"
    rows = [{"step": i, "text": "x" * length} for i, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    assert list(from_the_end(path)) == rows[::-1]
    assert list(rows_from(path)) == rows
    for share in (0.3, 0.5, 0.99):
        rest = list(rows_from(path, share))
        assert rest == rows[len(rows) - len(rest) :]
        place = share * path.stat().st_size
        ends = [line.end() for line in re.finditer(rb"\n", path.read_bytes())]
        due = [row for row, end in zip(rows, ends, strict=True) if end > place]
        assert rest == due or (rest == due[1:] and len(due[0]["text"]) >= 65_500)


def test_the_last_row_of_a_long_file_is_read_alone(tmp_path: Path) -> None:
    """64 GiB, most of them a hole."""
    path = tmp_path / "m.jsonl"
    path.touch()
    os.truncate(path, 1 << 36)
    with path.open("ab") as file:
        file.write(b'\n{"step": 7}\n')
    assert next(from_the_end(path)) == {"step": 7}


def test_a_broken_line_near_the_end_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}{"st\n{"step": 3}\n')
    rows = from_the_end(path)
    assert next(rows) == {"step": 3}
    with pytest.raises(DataError, match=r"m\.jsonl:2: not JSON"):
        next(rows)


def test_truncation_keeps_the_checkpoints_step_and_the_bytes_before_it(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    file.append([{"step": 0, "warm_start/step": k} for k in range(3)] + [{"step": s} for s in (1, 2, 3, 4)])
    before = file.path.read_bytes()
    assert file.truncate_after(2) == 2
    assert before.startswith(file.path.read_bytes())
    assert [row["step"] for row in read_jsonl(file.path)] == [0, 0, 0, 1, 2]
    assert file.truncate_after(-1) == 5
    assert file.path.read_bytes() == b""
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_truncation_by_another_field_removes_rows_without_it(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    file.append([*({"step": 0, "warm_start/step": k} for k in range(4)), {"step": 0, "phase": "rl"}, {"step": 1}])
    assert file.truncate_after(1, "warm_start/step") == 4
    assert [row["warm_start/step"] for row in read_jsonl(file.path)] == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 70_000)), max_size=12), st.integers(-1, 14))
@settings(deadline=None, max_examples=60)
def test_truncation_keeps_every_row_that_is_due_in_the_order_of_the_file(
    given_rows: list[tuple[int, bool, int]], last: int
) -> None:
    """Steps ascend by 0 .. 3; a row that is late has a step of any before it."""

    def is_late(row: Mapping[str, object]) -> bool:
        return row["late"] == 1

    step, rows = 0, []
    for number, late, length in given_rows:
        step += 0 if late else number
        rows.append({"step": max(0, step - number) if late else step, "late": int(late), "text": "x" * length})
    with tempfile.TemporaryDirectory() as folder:
        file = JsonlFile(Path(folder) / "m.jsonl")
        file.append(rows)
        with file.path.open("ab") as torn:
            torn.write(b'{"step": 0')
        kept = [row for row in rows if row["step"] < last or (row["step"] == last and not row["late"])]
        assert file.truncate_after(last, late=is_late, also=is_late) == len(rows) - len(kept)
        assert file.path.read_bytes() == b"".join(json.dumps(row).encode() + b"\n" for row in kept)


def test_truncation_reads_no_further_than_the_step_before(tmp_path: Path) -> None:
    """Behind 64 MiB that are no row: neither memory nor a parser meets them."""
    file = JsonlFile(tmp_path / "m.jsonl")
    file.path.touch()
    os.truncate(file.path, 1 << 26)
    with file.path.open("ab") as whole:
        whole.write(b'\n{"step": 6}\n{"step": 7}\n{"step": 8}\n{"step": 9')
    tracemalloc.start()
    removed = file.truncate_after(7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (removed, file.path.stat().st_size) == (1, (1 << 26) + len('\n{"step": 6}\n{"step": 7}\n'))
    assert peak < 1 << 20


def test_truncating_a_file_that_is_not_there_removes_nothing(tmp_path: Path) -> None:
    assert JsonlFile(tmp_path / "m.jsonl").truncate_after(3) == 0
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b'{"loss": 1}', b'{"step": "1"}', b'{"step": true}', b"\xff"])
def test_a_bad_whole_line_is_named_by_file_and_line_and_nothing_is_removed(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    content = path.read_bytes()
    with pytest.raises(DataError, match=r"m\.jsonl:2: "):
        read_jsonl(path)
    with pytest.raises(DataError, match=r"m\.jsonl:2: "):
        JsonlFile(path).truncate_after(0)
    assert path.read_bytes() == content


def test_no_rows_make_no_file_and_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the samples of a run with log.samples_per_step=0, and the ledger's lines of a step that ends no prompt."""
    file, synced = JsonlFile(tmp_path / "m.jsonl"), list[int]()
    monkeypatch.setattr("os.fsync", synced.append)
    file.append([])
    assert not file.path.exists()
    file.append([{"step": 1}])
    file.append(row for row in ())
    assert (file.path.read_text(), len(synced)) == ('{"step": 1}\n', 1)


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        file.append([{"step": 1, "loss": float("nan")}])
    assert not file.path.exists()
