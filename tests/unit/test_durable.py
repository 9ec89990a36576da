"""Files are replaced, and folders published and removed, completely or not at all, even if a kill interrupts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rl_megatron.durable import append_private, publish_folder, remove_folder, write_atomically


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
from rl_megatron.durable import naming
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with naming(Path("x")):
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
