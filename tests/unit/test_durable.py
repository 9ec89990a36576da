"""Files are replaced, and folders published and removed, completely or not at all; columns beside their JSON."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from rl_megatron.columns import ColumnReader, ColumnWriter, LogProbs, Ragged, TokenIds
from rl_megatron.files import append_private, publish_folder, remove_folder, write_atomically
from rl_megatron.types import Completion, Span, Turn
from tests.completions import columns_of, completion, plain


def folder_with(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    return path


def test_a_replaced_file_is_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"long" * 9, b"short"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["x"]


FULL = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from rl_megatron.files import add_path_to_errors
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with add_path_to_errors(Path("x")):
    save_file({"a": torch.zeros(1000)}, sys.argv[1])
"""


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """On a full disk it would hold the room that is left, and each try would leave another."""
    folder_with(tmp_path / "x", "in it")
    with pytest.raises(OSError, match="x"):
        write_atomically(tmp_path / "x", b"content")
    assert os.listdir(tmp_path) == ["x"]


def test_a_private_file_is_nobody_elses_whoever_had_it_before(tmp_path: Path) -> None:
    path, log = tmp_path / "x", tmp_path / "log"
    write_atomically(path, b"open")
    assert stat.S_IMODE(path.stat().st_mode) & 0o044
    write_atomically(path, b"mine", private=True)
    log.write_text("before\n")
    with append_private(log) as file:
        file.write(b"behind\n")
    assert log.read_text() == "before\nbehind\n"
    for file_ in (path, log):
        assert stat.S_IMODE(file_.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(log)
    with pytest.raises(OSError, match="link"):
        append_private(tmp_path / "link")


def test_a_published_folder_is_all_there_and_never_mixes_with_another(tmp_path: Path) -> None:
    publish_folder(folder_with(tmp_path / ".work", "a", "deep/b"), tmp_path / "final")
    assert (tmp_path / "final/deep/b").read_text() == "deep/b"
    with pytest.raises(OSError, match="final"):
        publish_folder(folder_with(tmp_path / ".work", "c"), tmp_path / "final")
    assert sorted(os.listdir(tmp_path / "final")) == ["a", "deep"]


def test_a_removed_folder_is_gone_and_so_is_what_a_kill_left(tmp_path: Path) -> None:
    remove_folder(tmp_path / "not there")
    folder_with(tmp_path / ".removing-x", "left")
    remove_folder(folder_with(tmp_path / "x", "a", "deep/b"))
    assert os.listdir(tmp_path) == []


def test_a_folder_loses_its_name_though_remains_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path, *, dir_fd: os.stat(f"/dev/null/{path}"))
        for _ in range(2):
            with pytest.raises(NotADirectoryError):
                remove_folder(folder_with(tmp_path / "x", "a"))
            assert not (tmp_path / "x").exists()
    assert len(os.listdir(tmp_path)) == 2
    remove_folder(tmp_path / "x")
    assert os.listdir(tmp_path) == []


# Columns of numbers: read-only, the same bits behind a checkpoint's JSON or beside it, and what is no such file.
TOKENS, LOGPROBS = TypeAdapter(TokenIds), TypeAdapter(LogProbs)


def test_what_was_sampled_cannot_be_changed() -> None:
    one = completion((1, 2, 3))
    for column in (one.token_ids, one.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


@pytest.mark.parametrize("values", [[], [0, 1, -1, 2**31 - 1, -(2**31)]])
def test_json_keeps_every_token(values: list[int]) -> None:
    again = TOKENS.validate_json(TOKENS.dump_json(np.array(values, np.int32)))
    assert (again.tolist(), again.dtype) == (values, np.int32)


def test_json_keeps_every_bit_of_a_log_prob() -> None:
    bits = np.array([0, 1, 0x80000000, 0xBF000001, 0x7F800000, 0xFF800000, 0x7FC00001], np.uint32)
    again = LOGPROBS.validate_json(LOGPROBS.dump_json(bits.view(np.float32)))
    assert again.dtype == np.float32
    assert again.view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([1, 2], "it must be base64 of <i4 numbers, not a list"),
        ("AAAA\n", "base64"),
        ("AAAA", "buffer size must be a multiple"),
        (None, "not a NoneType"),
    ],
)
def test_what_is_no_column_is_refused(text: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TOKENS.validate_json(json.dumps(text))


# Columns beside a checkpoint's JSON: raw numbers in files of numpy's format, and what is no such file is refused.
SEVERAL = TypeAdapter(tuple[Completion, ...])
ROUTES = np.array([*range(246, 256), 0], np.uint8).reshape(11, 1, 1)
KEPT = Ragged(np.array([7, -1, 2**31 - 1], np.int32), np.array([2, 0, 1], np.int32))
ONES = (
    completion((5, -1, 2**31 - 1), (-0.1, float("-inf"), 1e-40), spans=((0, 3), (2, 4)), columns={"routes": ROUTES}),
    completion(()),
    completion((7,), (-2.5,), finish="abort", columns={"kept": KEPT, "routes": ROUTES[:2] + np.int16(300)}),
)


def written(folder: Path) -> tuple[bytes, list[str]]:
    columns = ColumnWriter()
    return SEVERAL.dump_json(ONES, context=columns), columns.write(folder)


def read(folder: Path, text: bytes, names: list[str]) -> tuple[Completion, ...]:
    reader = ColumnReader(folder, names)
    found = SEVERAL.validate_json(text, context=reader)
    reader.check()
    return found


def test_files_are_numpys_and_have_the_bits_one_after_the_other(tmp_path: Path) -> None:
    """Read by numpy alone; four bytes a number, one a byte of columns, and 128 of each file's header."""
    text, names = written(tmp_path / "stream")
    tokens, logprobs, columns = (np.load(tmp_path / "stream" / name, allow_pickle=False) for name in names)
    assert names == ["tokens.npy", "logprobs.npy", "columns.npy"]
    expected = [("<i4", (4,)), ("<f4", (4,)), ("|u1", (39,))]
    assert [(x.dtype.str, x.shape) for x in (tokens, logprobs, columns)] == expected
    assert tokens.tolist() == [5, -1, 2**31 - 1, 7]
    assert logprobs.tobytes() == np.array([-0.1, float("-inf"), 1e-40, -2.5], np.float32).tobytes()
    assert columns[:11].tobytes() == ROUTES.tobytes()
    assert columns[11:35].tobytes() == KEPT.values.tobytes() + KEPT.counts.tobytes()
    assert [(tmp_path / "stream" / name).stat().st_size - 128 for name in names] == [16, 16, 39]
    said = json.loads(text)
    assert [one["token_ids"] for one in said] == [[0, 3], [3, 0], [3, 1]]
    assert [one["spans"] for one in said] == [[[0, 3], [2, 4]], [[0, 0]], [[0, 0]]]


def test_they_are_read_back_read_only(tmp_path: Path) -> None:
    found = read(tmp_path, *written(tmp_path))
    assert [plain(one) for one in found] == [plain(one) for one in ONES]
    assert found[0].spans[1] == Span(2, 4)
    with pytest.raises(ValueError, match="read-only"):
        found[2].token_ids[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        found[0].columns["routes"][0] = 0


def test_routes_of_an_older_checkpoint_are_read_as_a_column(tmp_path: Path) -> None:
    """They were in a file and a field of their own, without a dtype; a completion without any had null."""
    text, _ = written(tmp_path)
    (tmp_path / "columns.npy").unlink()
    np.save(tmp_path / "routes.npy", np.frombuffer(ROUTES.tobytes() + b"\x01\x02" * 2, np.uint8))
    older = json.loads(text)
    for one, routes in zip(older, ([0, 11, [11, 1, 1]], None, [11, 4, [2, 1, 1]]), strict=True):
        del one["columns"]
        one["routes"] = None if routes is None else {"data": routes[:2], "shape": routes[2]}
    names = ["tokens.npy", "logprobs.npy", "routes.npy"]
    found = read(tmp_path, json.dumps(older).encode(), names)
    wanted = [*ONES[:2], replace(ONES[2], columns={"routes": np.full((2, 1, 1), 0x0201, np.int16)})]
    assert [plain(one) for one in found] == [plain(one) for one in wanted]
    older[0]["routes"]["shape"] = [12, 1, 1]
    with pytest.raises(ValidationError, match="cannot reshape"):
        read(tmp_path, json.dumps(older).encode(), names)


def test_texts_are_utf8_in_a_file_and_the_json_does_not_grow_with_them(tmp_path: Path) -> None:
    """Half of an emoji, which no UTF-8 has, is read back as it was; so are texts in the JSON of an older checkpoint."""
    texts = ("4 + 4 = 8", "", "€ 😀", "half \ud83d", "long " * 100_000)
    several, columns = TypeAdapter(tuple[Turn, ...]), ColumnWriter()
    logprobs = np.zeros(1, np.float32)
    turns = tuple(Turn(start=1, logprobs=logprobs, finish_reason="stop", spans=(Span(0, 0),), text=t) for t in texts)
    text = several.dump_json(turns, context=columns)
    assert len(text) < 1000
    assert [one["text"] for one in json.loads(text)] == [[0, 9], [9, 0], [9, 8], [17, 8], [25, 500_000]]
    names = columns.write(tmp_path)
    found = np.load(tmp_path / "texts.npy", allow_pickle=False)
    assert found.dtype == np.uint8
    assert found.tobytes() == "".join(texts).encode("utf-8", "surrogatepass")
    reader = ColumnReader(tmp_path, names)
    assert tuple(one.text for one in several.validate_json(text, context=reader)) == texts
    reader.check()
    older = several.dump_json(turns[:3])
    assert [one["text"] for one in json.loads(older)] == list(texts[:3])
    assert tuple(one.text for one in several.validate_json(older, context=ColumnReader(tmp_path, []))) == texts[:3]


def test_nothing_is_written_of_a_document_without_columns(tmp_path: Path) -> None:
    assert ColumnWriter().write(tmp_path / "stream") == []
    assert not (tmp_path / "stream").exists()


def test_base64_of_an_older_checkpoint_is_read_too(tmp_path: Path) -> None:
    """Bytes of routes were in pydantic's base64, of - and _, and columns in that of + and /."""
    older = (
        b'[{"token_ids":"BQAAAP////8=","logprobs":"zczMvQAAgP8=","finish_reason":"stop","spans":[[0,3]],'
        b'"routes":{"data":"-_8A","shape":[3,1,1]}}]'
    )
    (one,) = read(tmp_path, older, [])
    assert (one.token_ids.tolist(), columns_of(one)) == ([5, -1], {"routes": [("uint8", [[[251]], [[255]], [[0]]])]})
    assert one.logprobs.tobytes() == np.array([-0.1, float("-inf")], np.float32).tobytes()


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("a pickle was loaded",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: np.save(path, np.array([Trap()]), allow_pickle=True), "is no column of int32: Object arrays"),
        (lambda path: np.save(path, np.zeros(4, np.int64)), "is no column of int32: it has int64 of shape"),
        (lambda path: np.save(path, np.zeros((2, 2), np.int32)), r"it has int32 of shape \(2, 2\)"),
        (lambda path: np.save(path, np.zeros(4, ">i4")), "is no column of int32: it has >i4"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(80)), "is no column of int32: the magic string"),
        (lambda path: path.write_bytes(b""), "is no column of int32"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is no column of int32"),
        (lambda path: np.save(path, np.zeros(3, np.int32)), r"has 3 numbers, of which 3 are of other .* has its 1 at"),
        (lambda path: np.save(path, np.zeros(5, np.int32)), "has 5 numbers, of which 4 are completions'"),
    ],
)
def test_what_is_no_such_file_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, names = written(tmp_path)
    change(tmp_path / "tokens.npy")
    with pytest.raises((ValueError, LookupError), match=rf"tokens\.npy.*{said}"):
        read(tmp_path, text, names)
    assert not capsys.readouterr().out


def test_files_that_are_not_listed_or_not_known_are_refused(tmp_path: Path) -> None:
    text, names = written(tmp_path)
    with pytest.raises(LookupError, match=r"tokens\.npy is not among the checkpoint's files"):
        read(tmp_path, text, names[1:])
    with pytest.raises(ValueError, match=r"rewards\.npy is no column: these are tokens\.npy, logprobs\.npy, columns"):
        read(tmp_path, text, [*names, "rewards.npy"])
