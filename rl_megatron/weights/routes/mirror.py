"""The mirror file: all Hugging Face tensors of a model in one mapped file, through which engine servers get weights.

The file is ``model.safetensors`` of a Hugging Face folder, in each node's shared memory or on a shared disk, so that an
engine's own loader can read it. Next to it ``model.safetensors.json`` holds the version and, once sealed, a checksum of
each tensor. With several writers each notes its version in its own file. Engines import this module: it needs only
what any engine's environment has.

Slurm's SIGKILL also ends processes that would remove a run's files, so the next run removes files that killed runs left
in a node's memory. A run's folder has a lock, which the system releases with the process that holds it, however that
ends. This is done for memory of one node: over a network another node's lock may not be seen.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.files import private_folder, write_atomically
from rl_megatron.weights.boxes import Shape, whole_box
from rl_megatron.weights.bytes.bits import stored_dtype, to_tensor
from rl_megatron.weights.bytes.mapped import MappedFile, header_bytes, read_header
from rl_megatron.weights.checks.reports import ChecksumReport, checksum, largest_change
from rl_megatron.weights.formats.hf_folder import Stored, config_text, stored
from rl_megatron.weights.layouts.tables.drafts import holds_draft
from rl_megatron.weights.layouts.tables.rows import SCORE

if TYPE_CHECKING:
    from rl_megatron.feature import Encoding

_LOCK, _NEW = "in_use", ".in_use.new"
_ENDING_SECONDS = 20.0  # time for an earlier start of the run to end


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which is this user's own. Another's lock on it is replaced."""
    with (folder / _NEW).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / _NEW).rename(folder / _LOCK)  # the name never exists without being held
        yield


def wait_until_unlocked(folder: Path) -> None:
    """Waits until no process holds the folder's lock, if it is there. Raises SyncError if that takes too long."""
    end = time.monotonic() + _ENDING_SECONDS
    while _is_held(folder / _LOCK):
        if time.monotonic() > end:
            raise SyncError(
                f"{folder} has weights of a run that still runs: `fuser {folder / _LOCK}` names its process. It is an "
                "earlier start of this run, which you may end, or a run in another container that shares this folder "
                "and has its run's folder under the same path: then take another run.name, run.dir or weights.folder"
            )
        time.sleep(0.1)


def _is_held(lock: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, PermissionError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_abandoned(path: Path) -> None:
    """Removes this user's folders next to ``path``, with its name up to the last "-", if no process locks them."""
    stem = path.name.rpartition("-")[0]
    for folder in path.parent.glob(f"{stem}-*"):
        with contextlib.suppress(OSError):  # it has no lock, another holds it, or another removes it
            if folder.lstat().st_uid == os.geteuid():
                with (folder / _LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


class Mirror:
    """The writer's side. ``tensors`` map the file; ``serve`` marks it as complete.

    Several processes of a node may be ``writers`` of it, this one the ``writer``-th; `make` has made it before. The
    tensors are in host memory, whatever the learner runs on: no GPU has room for a whole model. With an ``encoding``
    they are in memory of the writers, and ``serve`` writes them encoded to the file, each writer its share. Those named
    in ``float32`` are not in ``dtype``.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        encoding: Encoding | None = None,
        *,
        float32: Collection[str] = frozenset(),
        writer: int = 0,
        writers: int = 1,
    ) -> None:
        self.path, self._encoding, self._writer, self._writers = path, encoding, writer, writers
        entries = stored(shapes, stored_dtype(dtype), encoding, float32)
        self.num_bytes = sum(prod(shape) * given.itemsize for given, shape in entries.values())
        self._stored, self._sparse = _mapped(path, entries), [path]
        self.tensors = self._stored
        if encoding is not None:
            plain = stored(shapes, stored_dtype(dtype), None, float32)
            self.tensors = (
                _mapped(_plain(path), plain)
                if writers > 1
                else {name: torch.empty(shape, dtype=getattr(torch, given)) for name, (given, shape) in plain.items()}
            )
            self._sparse += [_plain(path)] if writers > 1 else []

    @staticmethod
    def make(
        path: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        config: Path,
        encoding: Encoding | None = None,
        *,
        float32: Collection[str] = frozenset(),
        writers: int = 1,
    ) -> None:
        """Makes the file, for this user alone. ``config`` becomes the folder's config.json, but for its quantization.

        Called by one process of a node, before any opens it. Raises SyncError if the folder of ``path`` already exists
        and other users can access it: they can guess its name.
        """
        claim_folder(path.parent)
        for left in path.parent.glob(f"{path.name}*.json"):  # files of a run that was killed
            left.unlink()
        quantization = None if encoding is None else encoding.config(shapes)
        drafts = holds_draft(shapes)
        text = config_text(config.parent, set(), quantization, drafts=drafts, scores=SCORE in shapes)
        path.with_name("config.json").write_text(text)
        _empty_file(path, stored(shapes, stored_dtype(dtype), encoding, float32))
        if encoding is not None and writers > 1:
            _empty_file(_plain(path), stored(shapes, stored_dtype(dtype), None, float32))

    def withdraw(self) -> None:
        """Marks the tensors as changing: readers refuse the file until every writer calls ``serve``.

        The first time it takes all of the file's memory. Raises SyncError where there is no room for it, or the file is
        gone.
        """
        self._check_linked()
        _note(self.path, self._writer).unlink(missing_ok=True)
        for path in self._sparse:
            _take_room(path)
        self._sparse = []

    def serve(self, version: int) -> None:
        """Marks what this writer wrote as ``version``'s, once all have written. Raises SyncError that names a tensor
        that cannot be encoded, or where the file is gone."""
        self._check_linked()
        note: dict[str, object] = {"version": version, "writers": self._writers}
        if self._encoding is not None:
            note["error"] = self._encode(self._encoding)
        write_atomically(_note(self.path, self._writer), json.dumps(note).encode())

    def sums(self) -> ChecksumReport:
        """Checksums of this writer's share of the tensors in the file."""
        started = time.perf_counter()
        mine = [(name, self._stored[name]) for name in self._share(self._stored)]
        rows = [("", n, whole_box(t.shape), checksum(t, tuple(t.shape))) for n, t in mine]
        return ChecksumReport(rows=rows, seconds=time.perf_counter() - started)

    def _check_linked(self) -> None:
        """Raises SyncError if the file has lost its name: this process still has it mapped, no server could open it."""
        if not self.path.exists():
            raise SyncError(
                f"{self.path}, the file from which servers read weights, was removed during the run. systemd-logind "
                "removes a user's files in /dev/shm when the last session of that user ends; set "
                "RemoveIPC=no in logind.conf, or set weights.folder to a folder elsewhere"
            )

    def _share(self, tensors: Iterable[str]) -> list[str]:
        """The names that fall to this writer."""
        return list(tensors)[self._writer :: self._writers]

    def _encode(self, encoding: Encoding) -> tuple[float, str]:
        """Fills the file. Returns the largest error of a tensor, and its name."""
        written = {name: encoding.write(name, self.tensors[name], self._stored) for name in self._share(self.tensors)}
        changes = {name: change for name, change in written.items() if change is not None}
        return largest_change([changes]) or (0.0, "")


def _head(entries: Stored) -> bytes:
    return header_bytes([(name, given, shape) for name, (given, shape) in entries.items()])


def claim_folder(folder: Path) -> None:
    """Makes a folder for weights, for this user alone: others can foretell its name. Raises SyncError if one is there
    that others can access."""
    try:
        private_folder(folder)
    except PermissionError as error:
        raise SyncError(
            f"{folder}, the folder for weights: {error.strerror}. The user who created it could read and change "
            "them; remove it, or set weights.folder to another folder"
        ) from error


def _empty_file(path: Path, entries: Stored) -> None:
    """Makes a file of zeros, which take no memory before `_take_room`; who maps a file of this name keeps that one."""
    head, size = _head(entries), sum(prod(shape) * given.itemsize for given, shape in entries.values())
    work = path.with_name(f".{path.name}.partial")
    work.unlink(missing_ok=True)
    with open(work, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(head)
        file.truncate(len(head) + size)
    work.replace(path)


def _take_room(path: Path) -> None:
    """Makes the file system set all of a file aside: it ends a process that writes where it has no room, by SIGBUS.

    Not called where files are made: those of direct transports may never be filled.
    """
    with path.open("r+b") as file:
        found, free = os.fstat(file.fileno()), shutil.disk_usage(path.parent).free
        try:
            os.posix_fallocate(file.fileno(), 0, found.st_size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise SyncError(
                f"{path}: {error.strerror}; the weights need {found.st_size} bytes there, and {free} are free. Make "
                "room (in a container's /dev/shm by docker run --shm-size), or set weights.folder to a folder with more"
            ) from error


def _mapped(path: Path, entries: Stored) -> dict[str, Tensor]:
    """The tensors of a file, mapped."""
    head, sizes = len(_head(entries)), [prod(shape) * given.itemsize for given, shape in entries.values()]
    flat = torch.from_file(str(path), shared=True, size=head + sum(sizes), dtype=torch.uint8)
    return {
        name: piece.view(getattr(torch, given)).view(shape)
        for (name, (given, shape)), piece in zip(entries.items(), flat[head:].split(sizes), strict=True)
    }


def _plain(path: Path) -> Path:
    """The tensors before they are encoded."""
    return path.with_name("unquantized.safetensors")


def read(path: Path, version: int) -> dict[str, Tensor]:
    """The mapped tensors by name. Raises SyncError if the file does not hold ``version``."""
    _noted(path, version)
    file = MappedFile(path)  # safetensors 0.8 keeps 64 bytes of each tensor that it reads
    entries = read_header(file).items()
    return {name: to_tensor(file.array(one.dtype, one.shape, one.start), one.dtype) for name, one in entries}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSeal:
    """The checksum of each tensor of a version.

    ``error`` is the largest relative error of a quantized tensor, and its name; None if none is quantized.
    """

    checksums: Mapping[str, int]
    error: tuple[float, str] | None = None


def seal(path: Path, version: int, checksums: Mapping[str, int]) -> VersionSeal:
    """Writes the checksums that readers of ``version`` must find. Raises SyncError if it holds another version."""
    noted = _noted(path, version) | {"checksums": checksums}
    write_atomically(_note(path), json.dumps(noted).encode())
    return _sealed(noted)


def read_seal(path: Path, version: int) -> VersionSeal:
    """The seal of ``version``. Raises SyncError if the file holds another version, or is not sealed."""
    noted = _noted(path, version)
    if "checksums" not in noted:
        raise SyncError(f"{path}: version {version} is not sealed, because its sender died")
    return _sealed(noted)


def _sealed(noted: Mapping[str, Any]) -> VersionSeal:
    error = noted.get("error")
    return VersionSeal(checksums=noted["checksums"], error=None if error is None else (float(error[0]), str(error[1])))


def check(path: Path, version: int) -> None:
    """Raises CorruptionError that names the file's tensors with bytes that do not match the seal."""
    sealed = read_seal(path, version).checksums
    wrong = [name for name, t in read(path, version).items() if checksum(t, tuple(t.shape)) != sealed.get(name)]
    if wrong:
        raise CorruptionError(f"{path}, version {version}: its bytes are not the learner's in {', '.join(wrong)}")


def shapes(path: Path) -> dict[str, Shape]:
    """Shape of every tensor of the file."""
    return {name: entry.shape for name, entry in read_header(MappedFile(path)).items()}


def dtypes(path: Path) -> dict[str, torch.dtype]:
    """The dtype of every tensor of the file."""
    return {name: getattr(torch, entry.dtype) for name, entry in read_header(MappedFile(path)).items()}


def _noted(path: Path, version: int) -> dict[str, Any]:
    """Returns the first writer's note, with the largest error of all. Raises SyncError if not all noted ``version``."""
    notes = [_read_note(path, 0)]
    notes += [_read_note(path, writer) for writer in range(1, notes[0].get("writers", 1))]
    wrong = next((note["version"] for note in notes if note["version"] != version), version)
    if wrong != version:
        raise SyncError(f"{path} holds version {wrong}, not {version}: its sender died, or a newer push came")
    errors = [tuple(note["error"]) for note in notes if "error" in note]
    return notes[0] | ({"error": max(errors)} if errors else {})


def _read_note(path: Path, writer: int) -> dict[str, Any]:
    note = _note(path, writer)
    noted: dict[str, Any] = json.loads(note.read_text()) if note.is_file() else {"version": None}
    return noted


def _note(path: Path, writer: int = 0) -> Path:
    return path.with_name(f"{path.name}.{writer}.json" if writer else f"{path.name}.json")
