"""Writes and reads checkpoint folders: a temporary name, a manifest, fsync, then the final name.

``checkpoints/step_000010/`` holds the shards in ``learner/`` and, if there is a critic, ``critic/``; the controller's
state in ``trainer.json``; and in ``manifest.json`` the size and checksum of every file, as its writer reported them.
``warm_start_000040/`` is the same for a warm start that was stopped. A folder with its final name is complete.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import JsonValue, TypeAdapter, ValidationError

from rl_megatron.digests import KIND, Digest, digest_of, misfits
from rl_megatron.durable import publish_folder, remove_folder
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces import Learner
from rl_megatron.rollout.stream import StreamState
from rl_megatron.training.credit import AlgorithmState

_NAME = re.compile(r"(warm_start|step)_(\d{6,})")
_TEMPORARY = ".writing-"
_STATE_FILE, _MANIFEST_FILE = "trainer.json", "manifest.json"
_MAX_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The controller's state between steps. Random numbers are functions of (seed, step), so it has no generator."""

    step: int  # finished RL steps; 0 is right after the warm start
    prompts: dict[str, int]  # PromptStream.state()
    stream: StreamState | None  # of the prompts drawn; None where nothing is drawn ahead
    memory: AlgorithmState | None = None  # the algorithm's, by the name in checkpoints; None in a warm start
    warm_start_step: int | None = None  # supervised steps done in a stopped warm start; ``prompts`` is then its


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """The files that a checkpoint must hold, and their digests."""

    checksum: Literal["xxh3_128"]
    config: dict[str, JsonValue]  # see Checkpoint
    files: dict[str, Digest]


_STATE = TypeAdapter(TrainerState)
_MANIFEST = TypeAdapter(_Manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that was written: its folder, and the bytes that ranks wrote into it."""

    folder: Path
    num_bytes: int


class CheckpointStore:
    """The checkpoints of one run. Controller process only."""

    def __init__(self, folder: Path, *, keep: int, config: Mapping[str, JsonValue]) -> None:
        """``config``: see Checkpoint."""
        self._folder, self._keep, self._config = folder, keep, dict(config)

    async def save(self, state: TrainerState, learners: Mapping[str, Learner]) -> Saved:
        """Write a checkpoint with a folder for each of ``learners``, and remove the oldest beyond ``keep``.

        A kill at any moment leaves the previous checkpoint whole. Files are written in threads, so the event loop is
        not blocked. Raises CheckpointError, for example if the controller cannot see a file that a rank wrote.
        """
        warm = state.warm_start_step
        final = self._folder / (f"step_{state.step:06d}" if warm is None else f"warm_start_{warm:06d}")
        temporary = self._folder / f"{_TEMPORARY}{final.name}"
        await asyncio.to_thread(self._make_room, temporary, learners)
        files: dict[str, Digest] = {}
        for name, learner in learners.items():
            written = await learner.save(temporary / name)
            files |= {f"{name}/{file}": digest for file, digest in written.items()}
        await asyncio.to_thread(self._publish, temporary, final, state, files)
        return Saved(folder=final, num_bytes=sum(digest.bytes for digest in files.values()))

    def _make_room(self, temporary: Path, learners: Mapping[str, Learner]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(".*"):  # left by a killed save
            shutil.rmtree(left)
        for name in learners:
            (temporary / name).mkdir(parents=True)

    def _publish(self, temporary: Path, final: Path, state: TrainerState, files: dict[str, Digest]) -> None:
        """Check the ranks' files, add the controller's, rename the folder, and remove old checkpoints."""
        problems = misfits(temporary, files, read=False)
        there = {path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file()}
        problems += [
            f"{temporary / name}: no rank reported that it wrote this file" for name in sorted(there - files.keys())
        ]
        if problems:
            title = f"{temporary} does not hold what the ranks wrote; run.dir must be one shared folder on all nodes"
            raise CheckpointError(_listed([title, *problems]))
        text = _STATE.dump_json(state)
        (temporary / _STATE_FILE).write_bytes(text)
        manifest = _Manifest(checksum=KIND, config=self._config, files={**files, _STATE_FILE: digest_of(text)})
        (temporary / _MANIFEST_FILE).write_bytes(_MANIFEST.dump_json(manifest, indent=1))
        remove_folder(final)  # a resumed run reached the same step again: both checkpoints are equal
        publish_folder(temporary, final)
        for old in _all(self._folder)[: -self._keep]:
            remove_folder(old)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its manifest and the controller's state. Ranks verify their own files when they load."""

    folder: Path
    state: TrainerState
    files: Mapping[str, Digest]  # by name in ``folder``
    config: Mapping[str, JsonValue]  # the keys that a resume must give again (config_resume)

    async def load(self, learners: Mapping[str, Learner]) -> None:
        """Load each of ``learners`` from its folder. Raises CheckpointError that names files that have changed."""
        for name, learner in learners.items():
            await learner.load(self.folder / name, _inside(name, self.files))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a run's ``checkpoints`` folder."""
    found = _all(folder)
    return found[-1] if found else None


def _all(folder: Path) -> list[Path]:
    """Oldest first; a warm start comes before the steps."""
    found = folder.iterdir() if folder.is_dir() else ()
    named = [(match[1] == "step", int(match[2]), p) for p in found if (match := _NAME.fullmatch(p.name))]
    return [path for _, _, path in sorted(named)]


def read(folder: Path) -> Checkpoint:
    """Read ``trainer.json`` and the manifest, and compare the size of every file with the manifest.

    Raises CheckpointError that names each missing or torn file.
    """
    manifest = _manifest(folder)
    files = manifest.files
    if _STATE_FILE not in files or not _inside("learner", files):
        raise CheckpointError(
            f"{folder / _MANIFEST_FILE} lists no {_STATE_FILE} or no file of learner/\n{_advice(folder)}"
        )
    problems = misfits(folder, {name: wanted for name, wanted in files.items() if name != _STATE_FILE}, read=False)
    problems += misfits(folder, {_STATE_FILE: files[_STATE_FILE]}, read=True)
    if problems:
        raise unsound(folder, problems)
    try:
        state = _STATE.validate_json((folder / _STATE_FILE).read_bytes())
    except ValidationError as error:
        raise CheckpointError(
            f"{folder / _STATE_FILE} was written by another version of rl_megatron: {_said(error)}\nresume with the "
            "version that wrote it"
        ) from error
    return Checkpoint(folder=folder, state=state, files=files, config=manifest.config)


def files_of(shards: Path) -> Mapping[str, Digest]:
    """Digests of the files in ``shards``, from the checkpoint that it is part of; empty if it is part of none.

    Raises CheckpointError if the manifest is torn.
    """
    return _inside(shards.name, _manifest(shards.parent).files) if (shards.parent / _MANIFEST_FILE).exists() else {}


def unsound(folder: Path, problems: Sequence[str]) -> CheckpointError:
    """The error for a checkpoint whose files have changed since they were written."""
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
            f"{path} is torn or was written by another version of rl_megatron: {_said(error)}\n{_advice(folder)}"
        ) from error
    outside = [name for name in manifest.files if PurePosixPath(name).is_absolute() or ".." in name.split("/")]
    if outside:
        raise CheckpointError(f"{path} names files outside of the checkpoint: {_listed(outside)}\n{_advice(folder)}")
    return manifest


def _said(error: ValidationError) -> str:
    """The first of pydantic's problems, without the value."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}".removeprefix(": ")


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n".join([*lines[:_MAX_LINES], *more])


def _advice(folder: Path) -> str:
    return f"remove {folder} to resume from the checkpoint before it"
