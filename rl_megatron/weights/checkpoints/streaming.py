"""Writes a checkpoint's files of pieces of other files' tensors, in bounded memory. No torch: bytes are copied.

Input is memory-mapped. Whole rows are written straight from the map; other pieces are assembled in blocks of a MiB.

One process writes all files, or several write a part each; a kill costs the files in work.
They are written in a hidden folder next to the output. Each has a temporary name until it is synced; its digest and its
writer's notes are in ``.conversion``. A ``.conversion.json`` names source and files; a process that comes later,
after a kill or as another part, must find the same there. The one that finds every file written adds the index and
renames the folder. Several may do so at the same time. Each writes the same bytes in its own folder in ``.conversion``
and moves them from there. So a rename by another leaves nothing half written. No part waits for another.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np

from rl_megatron.digests import Digest, digest_file
from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.files import parse, sync, write_atomically
from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.bytes.mapped import MappedFile, change
from rl_megatron.weights.formats.hf_folder import companions

BLOCK_BYTES = 1 << 20  # the size of a write, which is done while it is still in the cache
FORGET_BYTES = 128 << 20  # a thread drops the pages of its input after so many bytes

T = TypeVar("T")
OnBytes = Callable[[int], None]
"""Called with the bytes of output since its last call."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes of output, or of what is verified, since its last call, and with those of all of it."""


class Sliceable(Protocol):
    """A stored tensor, or one that is computed when it is read."""

    def __getitem__(self, box: tuple[slice, ...], /) -> Bits:
        """A box of the tensor; every slice has a start and a stop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """``src_box`` of a source tensor is written to ``box`` of the new tensor; both have the same size."""

    box: Box
    source: Callable[[], Sliceable]
    src_box: Box


class StreamedTensor(Protocol):
    """A tensor that is written row by row."""

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""
        ...

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> DType:
        """The dtype of the blocks."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        ...

    def blocks(self, on_bytes: OnBytes) -> Iterator[Bits]:
        """The tensor's rows, about `BLOCK_BYTES` at a time, in order; contiguous."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One tensor to write. Its fragments, of its dtype, cover it except for padding, which is 0."""

    name: str
    shape: Shape
    dtype: DType
    fragments: tuple[Fragment, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def mapped(self, convert: Callable[[Sliceable], Sliceable], dtype: DType | None = None) -> Copy:
        """The tensor that ``convert`` makes of its sources, in ``dtype`` if that is another."""

        def read(source: Callable[[], Sliceable]) -> Sliceable:
            return convert(source())

        fragments = (replace(one, source=partial(read, one.source)) for one in self.fragments)
        return replace(self, dtype=dtype or self.dtype, fragments=tuple(fragments))

    def blocks(self, on_bytes: OnBytes, *, multiple: int | None = None) -> Iterator[Bits]:
        """The tensor's rows, about `BLOCK_BYTES` at a time, in order; contiguous.

        With ``multiple``, blocks have one size, a multiple of that many rows, except the last.
        """
        row = max(prod(self.shape[1:]) * self.dtype.itemsize, 1)
        unit = multiple or 1
        step = max(BLOCK_BYTES // row // unit, 1) * unit
        fragments = sorted(self.fragments, key=lambda fragment: fragment.box)
        straight = multiple is None and self._is_stack(fragments)
        for block in self._runs(fragments, step) if straight else self._assembled(fragments, step):
            on_bytes(block.nbytes)
            yield block

    def _is_stack(self, fragments: Sequence[Fragment]) -> bool:
        """True if the fragments are consecutive whole rows, without padding."""
        whole = tuple((0, size) for size in self.shape[1:])
        starts, stops = ([fragment.box[0][i] for fragment in fragments] for i in (0, 1))
        behind = [0, *stops] == [*starts, self.shape[0]]
        return behind and all(fragment.box[1:] == whole for fragment in fragments)

    def _runs(self, fragments: Sequence[Fragment], step: int) -> Iterator[Bits]:
        for fragment in fragments:
            source, ((first, last), *rest) = fragment.source(), fragment.src_box
            for low in range(first, last, step):
                yield np.ascontiguousarray(self._taken(source, ((low, min(low + step, last)), *rest)))

    def _assembled(self, fragments: Sequence[Fragment], step: int) -> Iterator[Bits]:
        sources = [(fragment, fragment.source()) for fragment in fragments]
        for low in range(0, self.shape[0], step):
            high = min(low + step, self.shape[0])
            block = np.zeros((high - low, *self.shape[1:]), self.dtype.bits)
            for fragment, source in sources:
                start, stop = max(low, fragment.box[0][0]), min(high, fragment.box[0][1])
                if start < stop:
                    shift = fragment.src_box[0][0] - fragment.box[0][0]
                    taken = self._taken(source, ((start + shift, stop + shift), *fragment.src_box[1:]))
                    block[_slices(((start - low, stop - low), *fragment.box[1:]))] = taken
            yield block

    def _taken(self, source: Sliceable, box: Box) -> Bits:
        """A box of a source. Raises WeightError if its elements are of another size, which numpy would cut or widen."""
        taken = source[_slices(box)]
        if taken.itemsize != self.dtype.itemsize:
            raise WeightError(
                f"{self.name} is {self.dtype}, but a part of it has {taken.itemsize} bytes an element; all must have "
                f"{self.dtype.itemsize}. Save its parts in one dtype"
            )
        return taken


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def numbers(tensor: StreamedTensor, on_bytes: OnBytes) -> Iterator[Bits]:
    """The blocks of a tensor. Raises WeightError at the first block with NaN or infinite values."""
    for block in tensor.blocks(on_bytes):
        if not tensor.dtype.all_numbers(block):
            raise WeightError(
                f"{tensor.name} holds NaN or infinite values; `rl-megatron convert --verify` counts them. "
                "Fetch the checkpoint again, or use an earlier one"
            )
        yield block


class Files:
    """Mapped input files. A thread drops their pages when it has finished an output file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = {path: MappedFile(path) for path in paths}

    def __getitem__(self, path: Path) -> MappedFile:
        return self._files[path]

    def __or__(self, other: Files) -> Files:
        joined = Files(())
        joined._files = self._files | other._files
        return joined

    def changed(self) -> list[str]:
        """A line for each file that has another size or time than when it was mapped."""
        return [line for file in self._files.values() if (line := file.changed())]

    def forget(self) -> None:
        """Drops the pages of all files."""
        for file in self._files.values():
            file.forget()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """One output file; ``write`` gets the file and its tensors, and returns notes on them."""

    name: str
    tensors: tuple[StreamedTensor, ...]
    write: Callable[[IO[bytes], Sequence[StreamedTensor], OnBytes], list[dict[str, object]]]


def divide_files(tensors: Iterable[T], limit: int, size: Callable[[T], int]) -> list[list[T]]:
    """Divides tensors of ``size`` bytes, in order, over files of at most ``limit`` bytes or one tensor."""
    groups: list[list[T]] = []
    free = 0
    for tensor in tensors:
        num_bytes = size(tensor)
        if not groups or num_bytes > free:
            groups.append([])
            free = limit
        groups[-1].append(tensor)
        free -= num_bytes
    return groups


Notes = Mapping[str, list[dict[str, object]]]
"""The notes of each file's writer on its tensors."""

_FILES_A_CORE = 2  # written concurrently: while one waits for the disk to sync, another is copied
_BOOK = ".conversion.json"
_NOTES = ".conversion"
_GONE = (errno.ENOENT, errno.ESTALE, errno.EEXIST)  # the last of a mkdir that found the folder, then did not
_SEEN_SECONDS = 60  # the wait until a network file system shows what another node renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The files that one of ``count`` processes writes: every ``count``-th from ``index`` on.

    With ``on_plan`` it writes nothing: that is called with all files, and with those that it would still write.
    """

    index: int = 0
    count: int = 1
    on_plan: Callable[[Sequence[Sink], Sequence[Sink]], None] | None = None


class _SourceChanged(CheckpointError):
    pass


def write_files(
    source: Path,
    out: Path,
    sinks: Sequence[Sink],
    files: Files,
    on_progress: OnProgress,
    finish: Callable[[Path, Notes], None],
    *,
    companion: Path,
    options: Mapping[str, object],
    share: Share,
) -> list[int]:
    """Writes the missing ``sinks`` of ``share``. If none is missing then, calls ``finish`` and names the folder.

    Returns the indices of the shares that lack files; none if ``out`` is complete, or with ``share.on_plan``. Files
    that an earlier process wrote are kept if they have their digests. Raises CheckpointError if ``out`` exists, the
    disk is full, or an earlier process began with another source or other ``options``. The same if one of ``files``
    changed since it was mapped, or config.json or one of the `companions` of ``companion`` since the call. Raises
    WeightError like `numbers`.
    """
    beside = _sibling(companion)
    book = json.loads(json.dumps({"source": fingerprint(source), "files": [sink.name for sink in sinks], **options}))
    partial = out.with_name(f".{out.name}.partial")
    if _is_complete(out, book, share):
        return []
    _raise_changed(files.changed(), "")  # the mapped files are those that the book names
    own = sinks[share.index :: share.count]
    if share.on_plan is not None:
        _must_match(partial, out, _read(partial / _NOTES / _BOOK) or book, book)
        share.on_plan(sinks, [sink for sink in own if not (partial / sink.name).is_file()])
        return []
    try:
        _begin(partial, out, book)
        if _is_complete(out, book, share):  # another part completed it between the two lines above
            shutil.rmtree(partial, ignore_errors=True)  # another part may write there now, and will remove it too
            return []
        total = sum(tensor.num_bytes for sink in own for tensor in sink.tensors)
        _write_own(partial, own, files, lambda n: on_progress(n, total))
        _raise_changed(
            [*files.changed(), *_changes(beside, _sibling(companion))],
            "" if share.count == 1 else f"remove {partial}, ",
        )
        there = set(os.listdir(partial)) & {name.removesuffix(".json") for name in os.listdir(partial / _NOTES)}
        missing = {i % share.count for i, sink in enumerate(sinks) if sink.name not in there}
        if not missing:
            _publish(partial, out, book, finish)
        return sorted(missing)
    except (WeightError, _SourceChanged):  # the written files are bad: another attempt would fail too
        if share.count == 1:
            shutil.rmtree(partial)
        raise
    except OSError as error:
        if share.count > 1 and error.errno in _GONE and _completed_by_other(out, book):
            shutil.rmtree(out / _NOTES, ignore_errors=True)  # files of this part
            return []
        where = f"{error.filename}, renamed to {error.filename2}" if error.filename2 else partial
        raise CheckpointError(
            f"{where}: {error.strerror or error}; complete files stay there, and running the same command again "
            "continues with them"
        ) from error


def must_be_new(out: Path) -> None:
    """Raises CheckpointError if anything has the name, be it a link to a folder that is not there."""
    if os.path.lexists(out):
        raise _exists_error(out)


def _exists_error(out: Path) -> CheckpointError:
    what = "exists" if out.exists() else "is a link to a folder that is not there"
    return CheckpointError(f"{out} {what}; remove it or give another name")


def fingerprint(folder: Path) -> list[list[object]]:
    """Name, size and time of every file, to recognize the same source."""
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def _sibling(companion: Path) -> dict[Path, os.stat_result]:
    return {path: path.stat() for path in (*companions(companion), companion / "config.json") if path.is_file()}


def _changes(was: Mapping[Path, os.stat_result], now: Mapping[Path, os.stat_result]) -> list[str]:
    return [line for path in sorted({*was, *now}) if (line := change(path, was.get(path), now.get(path)))]


def _raise_changed(changed: Sequence[str], first: str) -> None:
    if changed:
        raise _SourceChanged(
            f"the source changed while it was read: {'; '.join(changed[:20])}. Wait until nothing writes there, {first}"
            "and convert again"
        )


def _is_complete(out: Path, book: Mapping[str, Any], share: Share) -> bool:
    """True if other parts have completed ``out``. Raises CheckpointError if anything else is there."""
    if not os.path.lexists(out):
        return False
    if share.count == 1 or _differing(_read(out / _BOOK), book):
        raise _exists_error(out)
    return True


def _completed_by_other(out: Path, book: Mapping[str, Any]) -> bool:
    """True if another part has published the folder while this one wrote there."""
    for _ in range(_SEEN_SECONDS):
        if not _differing(_read(out / _BOOK), book):
            return True
        time.sleep(1)
    return False


def _begin(partial: Path, out: Path, book: Mapping[str, Any]) -> None:
    """Makes the folder, or finds it begun with the same ``book``. Raises CheckpointError; FileNotFoundError where
    another part renames or removes it meanwhile."""
    path = partial / _NOTES / _BOOK
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [name for name in os.listdir(partial) if not name.startswith(".")]  # a part writes the book before them
    if not path.is_file():
        if files and out.exists():  # they were another part's, which has renamed their folder since
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if files:
            raise CheckpointError(f"{partial} was left by another version or program; remove it")
        write_atomically(path, json.dumps(book).encode())
    found = _read(path)
    if not found:  # another part has removed or renamed the folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    _must_match(partial, out, found, book)


def _must_match(partial: Path, out: Path, found: Mapping[str, Any], book: Mapping[str, Any]) -> None:
    if differing := _differing(found, book):
        raise CheckpointError(
            f"{partial} holds a conversion with another {', '.join(differing)}; continue it with its own source and "
            f"options, remove it, or give another name than {out.name}"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse(path.read_text())
        return found
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is torn ({str(error)[:200]}); remove {path.parent}") from error


def _differing(found: Mapping[str, Any], book: Mapping[str, Any]) -> list[str]:
    return [key for key, value in book.items() if found.get(key) != value]


def _write_own(partial: Path, sinks: Sequence[Sink], files: Files, on_bytes: OnBytes) -> None:
    with ThreadPoolExecutor(_FILES_A_CORE * len(os.sched_getaffinity(0))) as pool:
        try:
            for _ in pool.map(lambda sink: _write_file(partial, sink, files, on_bytes), sinks):
                pass
        except (WeightError, OSError):
            pool.shutdown(cancel_futures=True)
            raise


def _write_file(folder: Path, sink: Sink, files: Files, on_bytes: OnBytes) -> None:
    final, notes_path = folder / sink.name, _notes_path(folder, sink.name)
    if _is_kept(final, notes_path):
        on_bytes(sum(tensor.num_bytes for tensor in sink.tensors))
        return
    for left in folder.glob(f".{sink.name}.*.tmp"):
        left.unlink()
    since = 0

    def counted(n: int) -> None:
        nonlocal since
        since += n
        if since > FORGET_BYTES:
            files.forget()
            since = 0
        on_bytes(n)

    temporary = folder / f".{sink.name}.{secrets.token_hex(4)}.tmp"
    with temporary.open("wb", buffering=0) as file:
        notes = sink.write(file, sink.tensors, counted)
    files.forget()
    sync(temporary)
    write_atomically(notes_path, json.dumps({"digest": asdict(digest_file(temporary)), "notes": notes}).encode())
    temporary.rename(final)


def _is_kept(final: Path, notes_path: Path) -> bool:
    """True if an earlier process wrote the file, and it has its digest; another file is removed."""
    if not final.is_file():
        return False
    if notes_path.is_file() and digest_file(final) == Digest(**_read(notes_path)["digest"]):
        return True
    try:
        final.unlink()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{final} had another digest than when it was written, and another part has published it; remove the "
            "output and convert again"
        ) from error
    return False


def _notes_path(folder: Path, name: str) -> Path:
    return folder / _NOTES / f"{name}.json"


def _publish(partial: Path, out: Path, book: Mapping[str, Any], finish: Callable[[Path, Notes], None]) -> None:
    """Raises FileNotFoundError at any point where another process has renamed the folder."""
    noted = {name: json.loads(_notes_path(partial, name).read_bytes()) for name in book["files"]}
    own = partial / _NOTES / secrets.token_hex(4)
    own.mkdir()
    finish(own, {name: note["notes"] for name, note in noted.items()})
    digests = {name: note["digest"] for name, note in noted.items()}
    write_atomically(own / _BOOK, json.dumps({**book, "digests": digests}).encode())
    for path in own.iterdir():
        path.replace(partial / path.name)
    sync(partial)
    partial.rename(out)
    sync(out.parent)
    shutil.rmtree(out / _NOTES, ignore_errors=True)
