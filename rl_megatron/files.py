"""Writes files and folders atomically and durably, reads JSON from any source, and finds shipped folders.

New files are written under a hidden name, made durable (fsync) and renamed; old ones are renamed before removal. So
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
"""Prefix of the name of a folder that is being removed."""
_REFUSED = re.compile(r"\(os error (\d+)\)$")  # text of Rust's std::io::Error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileOperation:
    """One read or write of a file, distinct from any other of the same file."""

    path: Path


_in_hand: dict[int, FileOperation] = {}  # thread id -> operation


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Adds the path to an OSError of an open file, for example on a full disk. An error of a Rust library, which is not
    an OSError and has its number in its text, becomes one.

    If the system lets the thread wait instead, `current_operations` shows it.
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
    """Returns the current read or write of each thread of this process, by `add_path_to_errors`."""
    return dict(_in_hand)


def append_private(path: Path) -> BinaryIO:
    """Opens the file ``path`` for appending and creates it if missing; other users can neither read nor write it.

    Raises OSError, also if it is another user's, or a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # mode of a file that an earlier start left
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "ab")


def private_folder(path: Path) -> None:
    """Creates the folder with access for this user only, or checks that it is such a folder. Raises OSError.

    PermissionError if it is a link, another user's, or if others may read or write there. Their files there, even
    links to this user's files, would be taken for the run's own.
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
    """Creates ``folder`` and its parent inside an existing folder. If a run's folder was moved or unmounted, the first
    file must not begin another at its path. Raises OSError."""
    for each in (folder.parent, folder):
        each.mkdir(mode=mode, exist_ok=True)


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's list of names, durable."""
    with add_path_to_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Makes ``folder`` and everything in it durable."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replaces the file ``path``: a reader, or a resume after a kill, sees the old content or the new, never a part.

    Processes of several hosts may write it concurrently. The umask decides whether other users can read it; they cannot
    read a ``private`` file.
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
            temporary.unlink()  # it would take the last space of a full disk
        raise
    sync(path.parent)


def publish_folder(work: Path, final: Path) -> None:
    """Makes ``work`` durable and renames it to ``final``. Raises OSError if that is a folder with files."""
    sync_tree(work)
    work.rename(final)
    sync(final.parent)


def remove_folder(path: Path) -> None:
    """Removes the folder if it exists. A kill half-way leaves a hidden ``.removing-<name>…``, never a part.

    Raises OSError if something cannot be removed, possibly after the folder has lost its name.
    """
    doomed = path.with_name(f"{REMOVING}{path.name}")
    if path.is_dir():
        path.rename(doomed.with_name(f"{doomed.name}.{secrets.token_hex(4)}") if doomed.exists() else doomed)
        sync(path.parent)
    for left in (doomed, *path.parent.glob(f"{glob.escape(doomed.name)}.*")):
        if left.is_dir():
            shutil.rmtree(left)


def parse(text: str | bytes | bytearray) -> Any:
    """Parses JSON. Raises ValueError for invalid JSON, and for too deep nesting, where json raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def field_value(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a row's field. ``a.b`` is field b of the object in a, unless the row has a field with that
    whole name. A field of null is null. Raises KeyError."""
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
    """The pydantic schema of a text that writes halves of surrogate pairs, invalid in UTF-8, as ``\\ud83d``."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.str_schema(
            serialization=core_schema.plain_serializer_function_ser_schema(_escaped, when_used="json")
        )


ForeignText = Annotated[str, _Escaped()]
"""Unchanged text from a user's code, an engine or a model: an error's text may quote half of an emoji."""


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def shipped(folder: Literal["conf", "slurm"]) -> Path:
    """Finds the folder ``conf`` or ``slurm``: in this package, from a wheel, or next to it, in a checkout.

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
