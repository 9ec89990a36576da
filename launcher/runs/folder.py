"""The paths of a run's files, in and next to its folder.

Locks files against other processes.

Chooses the folder of a run, and locks it against other processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.files import add_path_to_errors
from rl_megatron.placement.files import weights_folder

logger = logging.getLogger(__name__)


def mirror_path(config: RunConfig, run_folder: Path) -> Path:
    """Returns the mirror file of this run's weights for servers, the same path on each node that has one."""
    return _mirror(config, run_folder, _name(run_folder))


def drawn_mirror_path(config: RunConfig, folder: Path) -> Path:
    """Returns a mirror file of one process alone. Others may serve models from the same folder."""
    return _mirror(config, folder, secrets.token_hex(8))


def _name(run_folder: Path) -> str:
    return hashlib.sha256(os.fsencode(run_folder.resolve())).hexdigest()[:16]


def _mirror(config: RunConfig, folder: Path, name: str) -> Path:
    return (weights_folder(config) or folder.resolve()) / f"rl_megatron-{name}" / "model.safetensors"


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre mounted without flock; NFS without its service


def lock(file: BinaryIO) -> bool:
    """Locks a file, open for writing, until it is closed or the process ends in any way. False: another has it.

    On a file system without locks it warns, and returns True. Raises OSError that names the file.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        path = os.readlink(f"/proc/self/fd/{file.fileno()}")
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, error.strerror, path) from error
        said = "%s cannot be locked (%s); do not start a second process in the folder (docs/cluster.md)"
        logger.warning(said, path, error.strerror)
    return True


def is_running(folder: Path) -> bool | None:
    """True if a process holds the lock of a run's folder; None on a file system without locks."""
    try:
        with (folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return None if error.errno in _NO_LOCKS else False
    return False


_REMOVED = (errno.ENOENT, errno.ESTALE)  # NFS says the second of an open file that was removed elsewhere


class NameTaken(ConfigError):
    """Another run took the name of a new one between its choice and its claim."""


def from_file(stem: str) -> str:
    """Returns a valid ``run.name`` from the name of a configuration's file: ``my-run`` for ``my run.yaml``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:100] or "run"


def _relative_dir_note(root: Path) -> str:
    begin = "begin a new run without --resume"
    if root.is_absolute():
        return begin
    return f"run.dir={root} is relative to the current folder, {Path.cwd()}: start where the run began, or {begin}"


def choose(
    config: RunConfig,
    config_name: str,
    *,
    resume: bool,
    taken: Callable[[Path], bool] = Path.exists,
    advice: Callable[[Path], str] = lambda _: (
        "add --resume to continue it, from its start if it has no checkpoint, or "
    ),
) -> RunConfig:
    """Returns the config with a run name: as given, or config name and the number after the last taken (resume: that).

    ``config_name`` is the stem of the configuration's file; ``taken`` tells if a folder holds a run,
    ``advice`` how to continue that. Raises ConfigError if a new run's folder exists or a resume finds none.
    """
    root, name = config.run.dir, config.run.name
    config_name = from_file(config_name)
    if name is None:
        names = [config_name if i == 1 else f"{config_name}-{i}" for i in range(1, 10_000)]
        there = [n for n in names if taken(root / n)]
        if resume and not there:
            raise ConfigError(f"--resume: there is no run {config_name!r} in {root}; {_relative_dir_note(root)}")
        if not resume and names[-1] in there:
            raise ConfigError(f"{root} has {names[-1]}, the highest number; set run.name, or another run.dir")
        name = names[0] if not there else there[-1] if resume else names[names.index(there[-1]) + 1]
    elif resume and not (root / name).is_dir():
        raise ConfigError(f"--resume: {root / name} does not exist; {_relative_dir_note(root)}")
    elif not resume and taken(root / name):
        raise ConfigError(f"run.name={name}: {root / name} exists; {advice(root / name)}take another name")
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def refuse_copied(config: RunConfig, file: Path, overrides: Sequence[str]) -> None:
    """Raises ConfigError where ``file`` lies in a run's folder, but names another run: the folder was copied or moved.

    Not where an override names the run.
    """
    here, named = file.absolute().parent, config.run.dir / str(config.run.name)
    holds_run = (here / "metrics.jsonl").is_file() or any(here.glob("checkpoints/*/manifest.json"))
    if (
        file.name == "config.yaml"
        and config.run.name is not None
        and holds_run
        and here.resolve() != named.resolve()
        and not any(override.startswith("run.name=") for override in overrides)
    ):
        away = "" if here.parent.resolve() == config.run.dir.resolve() else f" run.dir={shlex.quote(str(here.parent))}"
        other = f", or run.name={config.run.name} to continue {named}" if named.is_dir() else ""
        raise ConfigError(
            f"--resume: {file} belongs to run {named}, but is in {here}: it was copied or moved, or the current "
            f"folder is another; add run.name={here.name}{away} to continue the run that is there{other}"
        )


@contextlib.contextmanager
def claim(folder: Path, *, resume: bool) -> Iterator[Claim]:
    """Makes the run's folder (a resume: finds it) and locks it against other processes while the context is open.

    Raises ConfigError if another process holds the lock, NameTaken if a new run's folder is there. The lock ends with
    the process, however that ends. It has its own file, because logs are rotated and NFS
    cannot lock the folder.

    Raises OSError that names what of the folder cannot be opened or locked, and then keeps no file open.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(exist_ok=resume)
    except FileExistsError as error:
        raise NameTaken(f"{folder}: another run has just taken this name; start again") from error
    with contextlib.ExitStack() as held:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # open, so its inode number is not reused
        held.callback(os.close, number)
        folder, stat = folder.absolute(), os.fstat(number)
        if (file := _locked(folder)) is None:
            raise ConfigError(f"{folder}: another process runs in it; wait for its end, or end it")
        claim = Claim(folder=folder, number=stat, file=file)
        held.callback(claim.close)
        yield claim


def _locked(folder: Path) -> BinaryIO | None:
    """Returns the locked file; None where another process has it."""
    with contextlib.ExitStack() as held:
        file = held.enter_context((folder / "lock").open("ab"))
        if not lock(file):
            return None
        held.pop_all()
        return file


@dataclass(slots=True, kw_only=True)
class Claim:
    """The claim to a run's folder; calling it checks and renews it. Any thread may call it, and `hold`."""

    folder: Path
    number: os.stat_result  # identifies the folder, also under another name
    file: BinaryIO
    _turns: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> None:
        """Raises CheckpointError if ``folder`` no longer is this folder: it was moved, or its file system unmounted.
        Raises it too if another process has the lock, because its file was removed."""
        _refuse_another(self.folder, self.number)
        with self._turns:
            self._renew()

    def hold(self) -> None:
        """Takes the lock again if its file was removed, like `__call__`, at the price of a look at it. Other problems
        of the folder, which may be back by then, are left to `__call__`. Raises CheckpointError if another process has
        the lock."""
        with self._turns, contextlib.suppress(OSError):
            if self._is_unlinked() and os.path.samestat(self.folder.stat(), self.number):
                self._lock_again()

    def close(self) -> None:
        """Releases the lock."""
        self.file.close()

    def _renew(self) -> None:
        """Renews the lock's file: clusters remove files that are old, which it gets in weeks, and users empty ones."""
        try:
            with add_path_to_errors(self._path):
                os.utime(self.file.fileno())
            is_gone = self._is_unlinked()
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
            is_gone = True
        if is_gone:
            self._lock_again()

    @property
    def _path(self) -> Path:
        return self.folder / "lock"

    def _is_unlinked(self) -> bool:
        """True if the locked file has lost its name. Raises OSError if its path cannot be read."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self.file.fileno()))
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
            return True

    def _lock_again(self) -> None:
        if (file := _locked(self.folder)) is None:
            raise CheckpointError(
                f"{self._path} was removed, and another process now runs in the folder; this process ends, and writes "
                "no checkpoint or export. The folder mixes files of both, so resume from an earlier checkpoint"
            )
        self.file.close()
        self.file = file
        said = "%s was removed, and was created and locked again: it keeps other processes out of the run"
        logger.warning(said, self._path)


def _refuse_another(folder: Path, claimed: os.stat_result) -> None:
    try:
        if os.path.samestat(folder.stat(), claimed):
            return
        now = "another folder is there now"
    except OSError as error:
        now = str(error.strerror)
    raise CheckpointError(
        f"{folder} is no longer the folder that this run began in ({now}), so the run writes no checkpoint or "
        "export there: it was moved or removed, or its file system was unmounted; put it back, and resume"
    )
