"""Refusals of the system, and Ctrl-C before anything runs, give one line and no traceback."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import NoReturn

import pytest

from launcher.processes import limits
from rl_megatron.durable import write_atomically
from rl_megatron.observability.files import JsonlFile
from rl_megatron.observability.log import run_log
from tests.unit.launcher.commands import status_of


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/dev/null", "error: /dev/null: "),
        ("/proc/nowhere", "error: /proc/nowhere"),
        ("{tmp}/itself", "error: {tmp}/itself"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, said: str
) -> None:
    (tmp_path / "itself").symlink_to("itself")
    assert status_of("train", f"run.dir={folder.format(tmp=tmp_path)}", f"model.cache_dir={tmp_path}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said.format(tmp=tmp_path))


def test_a_full_disk_names_the_file_each_time() -> None:
    """When a row is written, and when what is left of it is at the end."""
    full = JsonlFile(Path("/dev/full"))
    for act in (lambda: full.append([{"step": 1}]), full.close):
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            act()
    full.close()


def test_a_replaced_file_is_named_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0")
    (tmp_path / ".x.0.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/x'"):
        write_atomically(tmp_path / "x", b"1" * 10)


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    import logging

    with run_log(tmp_path, role="controller"):
        for _ in range(3):
            logging.getLogger("rl_megatron").info("said")
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(24, "Too many open files", "/a"), "/a: Too many open files\nthe limit of open files"),
        (OSError(13, "Permission denied", "/a", None, "/b"), "/a: /b: Permission denied"),
        (RuntimeError("can't start new thread"), "can't start new thread\nno thread could be started"),
        (RuntimeError("a fault of ours"), None),
        (TimeoutError(), None),
    ],
)
def test_what_the_system_refuses_is_told_from_faults_of_ours(error: OSError | RuntimeError, said: str | None) -> None:
    refusal = limits.refusal(error)
    assert refusal is None if said is None else refusal is not None and refusal.startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "interrupted; the run had not begun, so start it again\n"),
        (["--resume"], "interrupted; --resume continues from the last checkpoint, or starts over if there is none\n"),
    ],
)
def test_ctrl_c_before_a_run_has_its_folder_promises_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.commands.train.uncollected", interrupted)  # around the imports, which take seconds
    if options:
        (tmp_path / "x").mkdir()
    assert status_of("train", f"run.dir={tmp_path}", "run.name=x", f"model.cache_dir={tmp_path}", *options) == 130
    assert capsys.readouterr().err == said
