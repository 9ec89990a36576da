"""Writes files and folders atomically and durably, reads JSON that anybody may have written, and finds shipped folders.

What is new is written under a hidden name, made durable (fsync) and renamed; what is old is renamed before it goes. So
a stop at any moment leaves files whole or absent. Shipped folders are recipes and job templates, in a checkout and in
an installed wheel.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

REMOVING = ".removing-"
"""Before the name of a folder that is being removed."""
_REFUSED = re.compile(r"\(os error (\d+)\)$")  # as Rust's std::io::Error says it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileOperation:
    """One reading or writing of a file, which is no other of the same file."""

    path: Path


_in_hand: dict[int, FileOperation] = {}  # by thread


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Has what the system refuses to an open file, as a full disk does, name it: an OSError says the path. So does one
    of a library in Rust, which is none of Python's and has its number in its text.

    Where the system lets the thread wait instead, `current_operations` says it.
    """
    thread = threading.get_ident()
    outer = _in_hand.get(thread)
    _in_hand[thread] = FileOperation(path=path)
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise
        number = int(refused[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    finally:
        if outer is None:
            del _in_hand[thread]
        else:
            _in_hand[thread] = outer


def current_operations() -> dict[int, FileOperation]:
    """What each thread of this process reads or writes now, by `add_path_to_errors`."""
    return dict(_in_hand)


def append_private(path: Path) -> BinaryIO:
    """The file ``path``, made where it is not there, to write at its end; other users can neither read nor write it.

    Raises OSError, also where it is another user's, or a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # one that an earlier start left
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "ab")


def private_folder(path: Path) -> None:
    """Make the folder, for this user alone, or check that it is one already. Raises OSError.

    PermissionError where it is a link, another user's, or others may look into it or write there: what they put there,
    links to files of this user among it, would be taken for the run's own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        return
    found = path.lstat()
    mode = stat.filemode(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        why = f"it is there, but is no folder of user {os.geteuid()} alone (drwx------): {mode}, user {found.st_uid}"
        raise PermissionError(errno.EACCES, why, str(path))


def make_inside(folder: Path, *, mode: int = 0o777) -> None:
    """Make ``folder`` and the one that it is in, inside of a folder that is there: where a run's was moved or
    unmounted, the first file would begin another at its path. Raises OSError."""
    for each in (folder.parent, folder):
        each.mkdir(mode=mode, exist_ok=True)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's list of names, durable."""
    with add_path_to_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make ``folder`` and everything in it durable."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace the file ``path``: a reader, or a resume after a kill, sees the old content or the new, never a part.

    Processes of several hosts may write it at once. Other users can read it as the umask says; a ``private`` one they
    cannot.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    mode = 0o600 if private else 0o666
    try:
        with (
            add_path_to_errors(path),
            open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
        ):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with add_path_to_errors(path):
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()  # on a full disk it would hold the room that is left
        raise
    sync(path.parent)


def publish_folder(work: Path, final: Path) -> None:
    """Make ``work`` durable under the name ``final`` beside it. Raises OSError where a folder with files is there."""
    sync_tree(work)
    work.rename(final)
    sync(final.parent)


def remove_folder(path: Path) -> None:
    """Remove the folder, if it is there; killed half-way it leaves a hidden ``.removing-<name>…``, never a part.

    Raises OSError for what cannot be removed, if need be after the folder has lost its name.
    """
    doomed = path.with_name(f"{REMOVING}{path.name}")
    if path.is_dir():
        path.rename(doomed.with_name(f"{doomed.name}.{secrets.token_hex(4)}") if doomed.exists() else doomed)
        sync(path.parent)
    for left in (doomed, *path.parent.glob(f"{glob.escape(doomed.name)}.*")):
        if left.is_dir():
            shutil.rmtree(left)


def parse(text: str | bytes | bytearray) -> Any:
    """The value. Raises ValueError for what is no JSON, or is nested too deeply, for which json has RecursionError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value of a row's field; ``a.b`` is field b of the object in a, unless the row has a field of that whole name.
    A field of null is null. Raises KeyError."""
    if name in row:
        return row[name]
    inner: Any = row
    for part in name.split("."):
        if inner is None:
            return None
        if not isinstance(inner, Mapping):
            raise KeyError(name)
        inner = inner[part]
    return inner


@dataclass(frozen=True, slots=True)
class _Escaped:
    """The pydantic schema of a text whose halves of surrogate pairs, which no UTF-8 has, are written as ``\\ud83d``."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.str_schema(
            serialization=core_schema.plain_serializer_function_ser_schema(_escaped, when_used="json")
        )


ForeignText = Annotated[str, _Escaped()]
"""What a user's code, an engine or a model said, as it is: an error's text may quote half of an emoji."""


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def shipped(folder: Literal["conf", "slurm"]) -> Path:
    """The folder ``conf`` or ``slurm``: inside this package where a wheel put it, else beside it, in a checkout.

    Raises FileNotFoundError if an installation has neither.
    """
    package = Path(str(files("rl_megatron")))
    places = [package / folder, package.parent / folder]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"{folder}/ of rl_megatron is neither {places[0]} nor {places[1]}: the installation lacks it; install it again"
    )
