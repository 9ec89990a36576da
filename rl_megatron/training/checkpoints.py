"""Writes and reads checkpoint folders: a temporary name, a manifest, fsync, then the final name.

``checkpoints/step_000010/`` holds the shards in ``learner/`` and, if there is a critic, ``critic/``. The controller's
state is in ``trainer.json``; tokens and texts of groups that wait and prompts' pass rates are in ``stream/``.
``manifest.json`` has the size and checksum of every file, as its writer reported them.
``warm_start_000040/`` is the same for a warm start that was stopped. A folder with its final name is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from rl_megatron.columns import ColumnReader, ColumnWriter
from rl_megatron.config.sections.jobs import CHECKPOINT
from rl_megatron.data.problems.mixture import MixtureState
from rl_megatron.data.problems.pool import TableState
from rl_megatron.digests import KIND, Digest, digest_bytes, digests, mismatches
from rl_megatron.errors import CheckpointError
from rl_megatron.files import REMOVING, add_path_to_errors, publish_folder, remove_folder, write_atomically
from rl_megatron.interfaces import Learner, SaveHandle
from rl_megatron.observability import timeline
from rl_megatron.observability.recorder import Row
from rl_megatron.rollout.stream import StreamState
from rl_megatron.training.credit import AlgorithmState

logger = logging.getLogger(__name__)

_TEMPORARY, _MAX_LINES = ".writing-", 20
_STATE_FILE, _MANIFEST_FILE, _COLUMNS = "trainer.json", "manifest.json", "stream"
_FIRST_LOOK = 0.1  # seconds until ranks are asked again whether they have written


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The controller's state between steps. Random numbers are functions of (seed, step), so it has no generator."""

    __pydantic_config__: ClassVar = ConfigDict(ser_json_inf_nan="strings")  # groups that wait have rewards that failed

    step: int  # finished RL steps; 0 is right after the warm start
    prompts: dict[str, int] | MixtureState  # PromptStream.state()
    stream: StreamState | None  # state of the prompts drawn; None where nothing is drawn ahead
    left_out: tuple[int, ...] = ()  # PromptStream.left_out, ascending
    memory: AlgorithmState | None = None  # the algorithm's, by the name in checkpoints; None in a warm start
    table: TableState | None = None  # table of data.curriculum
    ends: dict[str, int | None] = field(default_factory=dict)  # EndTokens of what was learned; empty where unknown
    skipped: dict[str, int] = field(default_factory=dict)  # optimizer steps in a row until now, by model
    row: Row | None = None  # metrics of this step, where a stop put off its evaluation
    warm_start_step: int | None = None  # supervised steps done in a stopped warm start; ``prompts`` is then its


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """The files that a checkpoint must hold, and their digests."""

    checksum: Literal["xxh3_128"]
    config: dict[str, JsonValue]  # see Checkpoint
    files: dict[str, Digest]
    accuracy: float | None = None  # held-out, of these weights
    measured_by: str = ""  # see CheckpointStore; of older versions empty


_STATE = TypeAdapter(TrainerState)
_MANIFEST = TypeAdapter(_Manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedShards:
    """The files of ranks in a checkpoint's folder; seconds of the slowest rank, added up over the models."""

    folder: Path
    num_bytes: int
    write_seconds: float


class CheckpointStore:
    """The checkpoints of one run. Controller process only."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        config: Mapping[str, JsonValue],
        keep_best: int = 0,
        measured_by: str = "",
        claimed: Callable[[], None] = lambda: None,
    ) -> None:
        """``config``: see Checkpoint. ``measured_by``: a digest of how accuracies are measured. Those that differ in it
        are not compared; those of older versions, which have none, count as measured alike. ``claimed`` raises
        CheckpointError where the run's folder is another by now; it is called before anything is written."""
        self.claimed = claimed
        self._folder, self._config, self._measured_by = folder, dict(config), measured_by
        self._keep, self._keep_best = keep, keep_best

    async def save(
        self, state: TrainerState, learners: Mapping[str, Learner], accuracy: float | None = None
    ) -> PendingCheckpoint:
        """Begins a checkpoint of this moment, with a folder for each of ``learners``; the one before must be finished.

        ``accuracy``: of these weights, held-out, where it was measured. Returns once training may continue. A kill at
        any moment leaves the previous checkpoint whole. Files are written in threads, so the event loop is not blocked.
        Raises CheckpointError.
        """
        warm = state.warm_start_step
        final = self._folder / (f"step_{state.step:06d}" if warm is None else f"warm_start_{warm:06d}")
        temporary = self._folder / f"{_TEMPORARY}{final.name}"
        began, columns = timeline.now(), ColumnWriter()
        await asyncio.to_thread(self._make_room, temporary, learners)
        text, savings = await asyncio.gather(
            asyncio.to_thread(_STATE.dump_json, state, context=columns),  # now: training changes what it refers to
            asyncio.gather(*(learner.save(temporary / name) for name, learner in learners.items())),
        )
        publish = partial(self._publish, temporary, final, (text, columns), accuracy)
        return PendingCheckpoint(final, dict(zip(learners, savings, strict=True)), publish, began)

    def _make_room(self, temporary: Path, learners: Mapping[str, Learner]) -> None:
        self.claimed()
        self._folder.mkdir(exist_ok=True)
        if temporary.is_dir():  # left by a killed save, as are the others
            shutil.rmtree(temporary)
        for left in (*self._folder.glob(f"{_TEMPORARY}*"), *self._folder.glob(f"{REMOVING}*")):
            with _warning(left):
                shutil.rmtree(left)
        for name in learners:
            (temporary / name).mkdir(parents=True)

    def _publish(
        self,
        temporary: Path,
        final: Path,
        state: tuple[bytes, ColumnWriter],
        accuracy: float | None,
        files: dict[str, Digest],
    ) -> None:
        """Checks the ranks' files, adds the controller's, renames the folder, and removes old checkpoints."""
        problems = mismatches(temporary, files, read=False)
        there = {path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file()}
        problems += [
            f"{temporary / name}: no rank reported that it wrote this file" for name in sorted(there - files.keys())
        ]
        if problems:
            title = f"{temporary} does not hold what the ranks wrote; run.dir must be one shared folder on all nodes"
            raise CheckpointError(_listed([title, *problems]))
        text, columns = state
        with add_path_to_errors(temporary / _STATE_FILE):
            (temporary / _STATE_FILE).write_bytes(text)
        with add_path_to_errors(temporary / _COLUMNS):
            written = [f"{_COLUMNS}/{name}" for name in columns.write(temporary / _COLUMNS)]
        everything = {**files, _STATE_FILE: digest_bytes(text), **digests(temporary, written)}
        manifest = _Manifest(
            checksum=KIND, config=self._config, files=everything, accuracy=accuracy, measured_by=self._measured_by
        )
        with add_path_to_errors(temporary / _MANIFEST_FILE):
            (temporary / _MANIFEST_FILE).write_bytes(_MANIFEST.dump_json(manifest, indent=1))
        with _warning(final):
            remove_folder(final)  # a resumed run reached the same step again: both checkpoints are equal
        publish_folder(temporary, final)
        for old in self._superseded(_all(self._folder)):
            with _warning(old):
                remove_folder(old)

    def note_accuracy(self, folder: Path, accuracy: float) -> None:
        """Notes the held-out accuracy of a checkpoint's weights, measured after it was written; warns if that fails."""
        try:
            manifest = replace(_manifest(folder), accuracy=accuracy, measured_by=self._measured_by)
            write_atomically(folder / _MANIFEST_FILE, _MANIFEST.dump_json(manifest, indent=1))
        except (CheckpointError, OSError) as error:  # it may have been removed, and no step needs it
            logger.warning("checkpoint.keep_best does not learn the accuracy of %s: %s", folder, error)

    def _superseded(self, found: Sequence[Path]) -> list[Path]:
        """Returns the folders of ``found``, oldest first, that no rule keeps."""
        kept = set(found[-self._keep :])
        if self._keep_best:
            scored: dict[str, list[tuple[float, int, Path]]] = {}
            for place, path in enumerate(found):
                try:
                    file = next(path.glob(_MANIFEST_FILE), path).stat()
                    by, accuracy = _scored(path, (file.st_ino, file.st_mtime_ns))
                except (CheckpointError, OSError) as error:  # it may be the best, so it stays; no step needs it
                    logger.warning("checkpoint.keep_best keeps a checkpoint of unknown accuracy: %s", error)
                    kept.add(path)
                else:
                    if accuracy is not None:
                        scored.setdefault(by or self._measured_by, []).append((accuracy, place, path))
            for alike in scored.values():
                kept |= {path for _, _, path in sorted(alike, reverse=True)[: self._keep_best]}
        return [path for path in found if path not in kept]


class PendingCheckpoint:
    """A checkpoint that is written and gets its name while training continues, in a task of its own."""

    def __init__(
        self, folder: Path, savings: Mapping[str, SaveHandle], publish: Callable[[dict[str, Digest]], None], began: int
    ) -> None:
        """``began``: when, by ``timeline.now``."""
        self.folder, self._savings, self._publish, self._began = folder, savings, publish, began
        self._hurry = asyncio.Event()
        self._thread: asyncio.Task[None] | None = None
        self._saved = asyncio.create_task(self._complete())
        self._saved.add_done_callback(self._retrieve_error)

    @property
    def is_running(self) -> bool:
        """True while it is being written; a second Ctrl-C cancels that, like every task."""
        return not self._saved.done() and not self._saved.cancelling()

    @property
    def saved(self) -> SavedShards | None:
        """The files of ranks, once the checkpoint has its final name; else None.

        Raises WorkerFailure, CheckpointError or OSError if it cannot have it.
        """
        return self._saved.result() if self._saved.done() else None

    async def finish(self) -> SavedShards:
        """Waits until the checkpoint has its final name. Raises as ``saved``."""
        self._hurry.set()
        return await asyncio.shield(self._saved)

    async def wait(self) -> None:
        """Stops waiting for ranks, and waits until no thread works on the folder. Raises nothing of the save's."""
        self._saved.cancel()
        await asyncio.wait({self._saved, self._thread or self._saved})

    async def _complete(self) -> SavedShards:
        """Publishes the ranks' files in a thread, which takes long, or removes them there: a full disk would stay full.

        No rank enters a collective while another still writes any model: its time limit may be shorter than a write.
        """
        await self._poll_until_written()
        try:
            return await self._published()
        except (CheckpointError, OSError):
            work = self.folder.with_name(f"{_TEMPORARY}{self.folder.name}")
            self._thread = asyncio.create_task(asyncio.to_thread(shutil.rmtree, work, ignore_errors=True))
            await asyncio.shield(self._thread)
            raise

    async def _published(self) -> SavedShards:
        written = await asyncio.gather(*(saving.finalize() for saving in self._savings.values()))
        named = zip(self._savings, written, strict=True)
        files = {f"{name}/{file}": digest for name, one in named for file, digest in one.files.items()}
        self._thread = asyncio.create_task(asyncio.to_thread(self._publish, files))
        await asyncio.shield(self._thread)
        num_bytes, seconds = sum(digest.bytes for digest in files.values()), sum(one.seconds for one in written)
        return SavedShards(folder=self.folder, num_bytes=num_bytes, write_seconds=seconds)

    async def _poll_until_written(self) -> None:
        """Polls ranks, which answer between their passes, each after a quarter of the time that it writes already."""
        began = timeline.now()
        while not self._hurry.is_set() and not all([await saving.is_written() for saving in self._savings.values()]):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(_FIRST_LOOK, (timeline.now() - began) / 4e9)):
                    await self._hurry.wait()
        for saving in self._savings.values():
            await saving.is_written(wait=True)

    def _retrieve_error(self, task: asyncio.Task[SavedShards]) -> None:
        """Records the ended save, and takes its error: of a run that failed before, asyncio would warn of it."""
        timeline.keep(timeline.SAVES, self.folder.name, self._began, timeline.now())
        if not task.cancelled():
            task.exception()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its manifest and the controller's state. Ranks verify their own files when they load."""

    folder: Path
    state: TrainerState
    files: Mapping[str, Digest]  # name in ``folder`` -> digest
    config: Mapping[str, JsonValue]  # the keys that a resume must give again (config_resume)

    async def load(self, learners: Mapping[str, Learner]) -> None:
        """Loads each of ``learners`` from its folder. Raises CheckpointError that names files that have changed."""
        for name, learner in learners.items():
            await learner.load(self.folder / name, _inside(name, self.files))


@contextlib.contextmanager
def _warning(folder: Path) -> Iterator[None]:
    """Warns about a file that cannot be removed, for example one that an NFS client has open. The run continues."""
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be removed: %s; it takes room, and the next checkpoint tries again", folder, error)


def latest(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint in a run's ``checkpoints`` folder."""
    return next(reversed(_all(folder)), None)


def _all(folder: Path) -> list[Path]:
    """Returns the checkpoints, oldest first; a warm start comes before the steps."""
    found = folder.iterdir() if folder.is_dir() else ()
    named = [(match[1] == "step", int(match[2]), p) for p in found if (match := CHECKPOINT.fullmatch(p.name))]
    return [path for _, _, path in sorted(named)]


def read(folder: Path) -> Checkpoint:
    """Reads ``trainer.json`` and the manifest, and compares the size of every file with that of the manifest. Raises
    CheckpointError that names each missing or torn file."""
    files = (manifest := _manifest(folder)).files
    if _STATE_FILE not in files or not _inside("learner", files):
        raise unsound(folder, [f"{folder / _MANIFEST_FILE} lists no {_STATE_FILE} or no file of learner/"])
    columns = _inside(_COLUMNS, files)
    own = {_STATE_FILE, *(f"{_COLUMNS}/{name}" for name in columns)}
    problems = mismatches(folder, {name: wanted for name, wanted in files.items() if name not in own}, read=False)
    problems += mismatches(folder, {name: wanted for name, wanted in files.items() if name in own}, read=True)
    if problems:
        raise unsound(folder, problems)
    return Checkpoint(folder=folder, state=_state(folder, columns), files=files, config=manifest.config)


def _state(folder: Path, columns: Iterable[str]) -> TrainerState:
    """Returns the controller's state, with the files of its columns by name."""
    try:
        reader = ColumnReader(folder / _COLUMNS, columns)
        state = _STATE.validate_json((folder / _STATE_FILE).read_bytes(), context=reader)
        reader.check()
    except ValidationError as error:
        raise CheckpointError(
            f"{folder / _STATE_FILE} was written by another version of rl_megatron: "
            f"{_first_problem(error)}\nresume with the "
            "version that wrote it"
        ) from error
    except (ValueError, LookupError) as error:
        raise CheckpointError(f"{error}\n{_advice(folder)}") from error
    return state


def file_digests(shards: Path) -> Mapping[str, Digest]:
    """Returns digests of the files in ``shards``, from the checkpoint that it is part of; empty if it is part of none.
    Raises CheckpointError if the manifest is torn."""
    return _inside(shards.name, _manifest(shards.parent).files) if (shards.parent / _MANIFEST_FILE).exists() else {}


def unsound(folder: Path, problems: Sequence[str]) -> CheckpointError:
    """Returns the error for a checkpoint with files that have changed since they were written."""
    return CheckpointError(f"{_listed(problems)}\n{_advice(folder)}")


def _inside(name: str, files: Mapping[str, Digest]) -> dict[str, Digest]:
    return {file.removeprefix(f"{name}/"): wanted for file, wanted in files.items() if file.startswith(f"{name}/")}


def _manifest(folder: Path) -> _Manifest:
    path = folder / _MANIFEST_FILE
    try:
        manifest = _MANIFEST.validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}\n{_advice(folder)}") from error
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is torn or was written by another version of rl_megatron: "
            f"{_first_problem(error)}\n{_advice(folder)}"
        ) from error
    outside = [name for name in manifest.files if PurePosixPath(name).is_absolute() or ".." in name.split("/")]
    if outside:
        raise CheckpointError(f"{path} names files outside of the checkpoint: {_listed(outside)}\n{_advice(folder)}")
    return manifest


@lru_cache(4096)  # each save asks for the scores of all kept checkpoints, and a manifest is long
def _scored(folder: Path, version: tuple[int, int]) -> tuple[str, float | None]:
    """Returns how the accuracy was measured, and it; ``version``: of the manifest's file. Raises as `_manifest`."""
    return (manifest := _manifest(folder)).measured_by, manifest.accuracy


def _first_problem(error: ValidationError) -> str:
    """Returns the first of pydantic's problems, without the value."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}".removeprefix(": ")


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n".join([*lines[:_MAX_LINES], *more])


def _advice(folder: Path) -> str:
    return f"remove {folder} to resume from the checkpoint before it"
