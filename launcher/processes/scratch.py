"""Temporary folders that a small helper process removes when this process ends, even by SIGKILL.

``python scratch.py <folder...>`` removes them when its standard input ends; standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_STOP_SECONDS = 20.0


@contextlib.contextmanager
def scratch(*others: Path, within: Path | None = None) -> Iterator[Path]:
    """Yields a new folder, by default in the machine's temporary one. It and ``others`` are removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="rl_megatron-", dir=within))
    with remove_at_exit(folder, *others), lock_against_tmpfiles(folder):
        yield folder


@contextlib.contextmanager
def lock_against_tmpfiles(folder: Path) -> Iterator[None]:
    """Locks the folder, so that systemd-tmpfiles, which removes old files from temporary folders, leaves it out."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system on a network that has no locks
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def remove_at_exit(*folders: Path) -> Iterator[None]:
    """Removes the folders when the context ends, at the latest when this process ends.

    Waits at most `_STOP_SECONDS`. The helper continues if a removal takes longer, for example of a large weight file.
    """
    command = [sys.executable, "-I", "-S", __file__, *map(str, folders)]
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_variables())
    assert remover.stdin is not None
    try:
        yield
    finally:
        remover.stdin.close()
        try:
            remover.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            said = "after %g s process %d still removes %s; it goes on by itself"
            logger.warning(said, _STOP_SECONDS, remover.pid, ", ".join(map(str, folders)))


def _variables() -> dict[str, str]:
    """Returns this process's variables. Tries again if another thread removes one while they are copied."""
    while True:
        with contextlib.suppress(KeyError):
            return dict(os.environ)


def main(folders: list[str]) -> None:
    """Waits for the end of the trainer, then removes the folders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the closed pipe ends it
    sys.stdin.buffer.read()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
