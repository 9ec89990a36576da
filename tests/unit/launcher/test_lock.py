"""A run's lock, also on file systems that have none."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import NoReturn

import pytest

from launcher.runs.lock import lock
from launcher.runs.name import claim
from rl_megatron.durable import append_private
from rl_megatron.errors import ConfigError


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As the kernel does for files of some file systems."""

    def flock(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    """Also once its log was moved, as logrotate does."""
    with claim(tmp_path / "run", resume=False):
        for log in tmp_path.glob("run/*.txt"):
            log.unlink()
        with pytest.raises(ConfigError, match="another process runs in it"), claim(tmp_path / "run", resume=True):
            pass
    with claim(tmp_path / "run", resume=True):
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    refuse(monkeypatch, code)
    with claim(tmp_path / "run", resume=False):
        pass
    assert f"{tmp_path}/run/lock cannot be locked ({os.strerror(code)}): nothing keeps" in caplog.text


def test_another_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EIO)
    with append_private(tmp_path / "key") as file, pytest.raises(OSError, match=f"error: '{tmp_path}/key'") as raised:
        lock(file)
    assert raised.value.errno == errno.EIO
