"""Writes a checkpoint's files, alone or beside other processes that write the others; a kill costs the files in work.

Files are written in a hidden folder beside the output: each under a temporary name, synced, renamed, with its digest
and its writer's notes in ``.conversion``. A ``.conversion.json`` says what is converted to what; who comes later, after
a kill or as another part, must find the same there. Who finds every file written adds the index and renames the folder.
That may be several at once: each writes the same bytes in a folder of its own in ``.conversion`` and moves them from
there, so that a rename by another under its feet leaves nothing half written. No part waits for another.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_megatron.digests import Digest, digest_file
from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.files import parse, sync, write_atomically
from rl_megatron.weights.bytes.mapped import change
from rl_megatron.weights.checkpoints.streaming import FORGET_BYTES, Files, OnBytes, OnProgress, Sink
from rl_megatron.weights.formats.hf_folder import companions

Notes = Mapping[str, list[dict[str, object]]]
"""What each file's writer said of its tensors."""

_FILES_A_CORE = 2  # written at once: while one waits for the disk to sync, another is copied
_BOOK = ".conversion.json"
_NOTES = ".conversion"
_GONE = (errno.ENOENT, errno.ESTALE, errno.EEXIST)  # the last of a mkdir that found the folder, then did not
_SEEN_SECONDS = 60  # until a network file system shows what another node renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one of ``count`` processes writes: every ``count``-th file from ``index`` on."""

    index: int = 0
    count: int = 1


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
    """Write the missing ``sinks`` of ``share``. If none is missing then, call ``finish`` and give the folder its name.

    Returns the indices of the shares that lack files; none if ``out`` is complete. Files that an earlier process wrote
    are kept if they have their digests. Raises CheckpointError if ``out`` exists, the disk is full, one of ``files``
    changed since it was mapped, config.json or one of the `companions` of ``companion`` since the call, or an earlier
    process began with another source or other ``options``; WeightError as `numbers`.
    """
    beside = _beside(companion)
    book = json.loads(json.dumps({"source": fingerprint(source), "files": [sink.name for sink in sinks], **options}))
    partial = out.with_name(f".{out.name}.partial")
    if _is_made(out, book, share):
        return []
    _raise_changed(files.changed(), "")  # what is mapped is what the book names
    try:
        _begin(partial, out, book)
        if _is_made(out, book, share):  # between the two lines above
            shutil.rmtree(partial, ignore_errors=True)  # another part may write there now, and will remove it too
            return []
        own = sinks[share.index :: share.count]
        total = sum(tensor.num_bytes for sink in own for tensor in sink.tensors)
        _write_own(partial, own, files, lambda n: on_progress(n, total))
        _raise_changed(
            [*files.changed(), *_changes(beside, _beside(companion))],
            "" if share.count == 1 else f"remove {partial}, ",
        )
        there = set(os.listdir(partial)) & {name.removesuffix(".json") for name in os.listdir(partial / _NOTES)}
        missing = {i % share.count for i, sink in enumerate(sinks) if sink.name not in there}
        if not missing:
            _publish(partial, out, book, finish)
        return sorted(missing)
    except (WeightError, _SourceChanged):  # what is written is bad: another attempt would fail too
        if share.count == 1:
            shutil.rmtree(partial)
        raise
    except OSError as error:
        if share.count > 1 and error.errno in _GONE and _others_made(out, book):
            shutil.rmtree(out / _NOTES, ignore_errors=True)  # what this one wrote there
            return []
        where = f"{error.filename}, renamed to {error.filename2}" if error.filename2 else partial
        raise CheckpointError(
            f"{where}: {error.strerror or error}; complete files stay there, and running the same command again "
            "continues with them"
        ) from error


def must_be_new(out: Path) -> None:
    """Raises CheckpointError if anything has the name, be it a link to a folder that is not there."""
    if os.path.lexists(out):
        raise _there(out)


def _there(out: Path) -> CheckpointError:
    what = "exists" if out.exists() else "is a link to a folder that is not there"
    return CheckpointError(f"{out} {what}; remove it or give another name")


def fingerprint(folder: Path) -> list[list[object]]:
    """Name, size and time of every file, to recognise the same source."""
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def _beside(companion: Path) -> dict[Path, os.stat_result]:
    return {path: path.stat() for path in (*companions(companion), companion / "config.json") if path.is_file()}


def _changes(was: Mapping[Path, os.stat_result], now: Mapping[Path, os.stat_result]) -> list[str]:
    return [line for path in sorted({*was, *now}) if (line := change(path, was.get(path), now.get(path)))]


def _raise_changed(changed: Sequence[str], first: str) -> None:
    if changed:
        raise _SourceChanged(
            f"the source changed while it was read: {'; '.join(changed[:20])}. Wait until nothing writes there, {first}"
            "and convert again"
        )


def _is_made(out: Path, book: Mapping[str, Any], share: Share) -> bool:
    """Whether other parts have completed ``out``. Raises CheckpointError if anything else is there."""
    if not os.path.lexists(out):
        return False
    if share.count == 1 or _differing(_read(out / _BOOK), book):
        raise _there(out)
    return True


def _others_made(out: Path, book: Mapping[str, Any]) -> bool:
    """Whether another part has published the folder under this one's feet."""
    for _ in range(_SEEN_SECONDS):
        if not _differing(_read(out / _BOOK), book):
            return True
        time.sleep(1)
    return False


def _begin(partial: Path, out: Path, book: Mapping[str, Any]) -> None:
    """Make the folder, or find it begun with the same ``book``. Raises CheckpointError; FileNotFoundError where
    another part renames or removes it meanwhile."""
    path = partial / _NOTES / _BOOK
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [name for name in os.listdir(partial) if not name.startswith(".")]  # before: parts write the book first
    if not path.is_file():
        if files and out.exists():  # they were another part's, which has renamed their folder since
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if files:
            raise CheckpointError(f"{partial} was left by another version or program; remove it")
        write_atomically(path, json.dumps(book).encode())
    found = _read(path)
    if not found:  # another part has removed or renamed the folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
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
    """Whether an earlier process wrote the file, and it has its digest; another file is removed."""
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
