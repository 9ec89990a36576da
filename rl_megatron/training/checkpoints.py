"""Checkpoint folders: written under a temporary name, listed in a manifest, made durable, then renamed.

``checkpoints/step_000010/`` holds ``learner/`` and, where there is one, ``critic/`` (their shards), ``trainer.json``
(all that the controller must remember) and ``manifest.json`` (size and checksum of every file, as its writer says).
``warm_start_000040/`` is the same, of a warm start that was stopped. A folder with its final name is whole.
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
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.training.credit import AlgorithmState

_NAME = re.compile(r"(warm_start|step)_(\d{6,})")
_TEMPORARY = ".writing-"
_STATE_FILE, _MANIFEST_FILE = "trainer.json", "manifest.json"
_MAX_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the controller remembers between steps. Random numbers are functions of (seed, step), so none is kept."""

    step: int  # finished RL steps; 0 is right after the warm start
    batches_sampled: int  # rollout batches taken from the prompts so far
    prompts: dict[str, int]  # PromptStream.state()
    buffer: tuple[RolloutBatch, ...]  # sampled, not yet trained on, oldest first
    memory: AlgorithmState | None = None  # the algorithm's, by the name in checkpoints; None in a warm start
    warm_start_step: int | None = None  # supervised steps done where they were stopped; ``prompts`` is then of theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """What must be in a checkpoint: without its files' names it verifies nothing."""

    checksum: Literal["xxh3_128"]
    config: dict[str, JsonValue]  # see Checkpoint
    files: dict[str, Digest]


_STATE = TypeAdapter(TrainerState)
_MANIFEST = TypeAdapter(_Manifest)


class CheckpointStore:
    """The checkpoints of one run. Controller process only."""

    def __init__(self, folder: Path, *, keep: int, config: Mapping[str, JsonValue]) -> None:
        """``config``: see Checkpoint."""
        self._folder, self._keep, self._config = folder, keep, dict(config)

    async def save(self, state: TrainerState, learners: Mapping[str, Learner]) -> Path:
        """Write a checkpoint, a folder for each of ``learners``, and drop the oldest beyond ``keep``.

        Killed at any moment, the last whole one stays. The event loop turns meanwhile, however much is written. Raises
        CheckpointError, as where a file of the learners' is not seen from here.
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
        return final

    def _make_room(self, temporary: Path, learners: Mapping[str, Learner]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(".*"):  # of a save that was killed
            shutil.rmtree(left)
        for name in learners:
            (temporary / name).mkdir(parents=True)

    def _publish(self, temporary: Path, final: Path, state: TrainerState, files: dict[str, Digest]) -> None:
        """Add what is the controller's; give the folder its name; drop old ones."""
        problems = misfits(temporary, files, read=False)
        there = {path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file()}
        problems += [
            f"{temporary / name}: no rank says that it wrote this file" for name in sorted(there - files.keys())
        ]
        if problems:
            title = f"{temporary} is not what the ranks wrote; is run.dir one folder on all nodes?"
            raise CheckpointError(_listed([title, *problems]))
        text = _STATE.dump_json(state)
        (temporary / _STATE_FILE).write_bytes(text)
        manifest = _Manifest(checksum=KIND, config=self._config, files={**files, _STATE_FILE: digest_of(text)})
        (temporary / _MANIFEST_FILE).write_bytes(_MANIFEST.dump_json(manifest, indent=1))
        remove_folder(final)  # the same step again, after a resume: both are whole, and hold the same
        publish_folder(temporary, final)
        for old in _all(self._folder)[: -self._keep]:
            remove_folder(old)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint as its manifest tells of it, and the controller's part. The ranks verify theirs."""

    folder: Path
    state: TrainerState
    files: Mapping[str, Digest]  # by name in ``folder``
    config: Mapping[str, JsonValue]  # the keys that a resume must give again (config_resume)

    async def load(self, learners: Mapping[str, Learner]) -> None:
        """Have each of ``learners`` continue from its folder. Raises CheckpointError that names what is changed."""
        for name, learner in learners.items():
            await learner.load(self.folder / name, _inside(name, self.files))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run's ``checkpoints`` folder."""
    found = _all(folder)
    return found[-1] if found else None


def _all(folder: Path) -> list[Path]:
    """Oldest first; a warm start comes before the steps."""
    found = folder.iterdir() if folder.is_dir() else ()
    named = [(match[1] == "step", int(match[2]), p) for p in found if (match := _NAME.fullmatch(p.name))]
    return [path for _, _, path in sorted(named)]


def read(folder: Path) -> Checkpoint:
    """A checkpoint, after the size of every file was compared with the manifest, and what ``trainer.json`` holds.

    Raises CheckpointError naming each missing or torn file.
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
            f"{folder / _STATE_FILE} is not of this version: {_said(error)}\nresume with the version that wrote it"
        ) from error
    return Checkpoint(folder=folder, state=state, files=files, config=manifest.config)


def files_of(shards: Path) -> Mapping[str, Digest]:
    """What a checkpoint says of the files in ``shards``, one of its folders; nothing where it is of none.

    Raises CheckpointError where its manifest is torn.
    """
    return _inside(shards.name, _manifest(shards.parent).files) if (shards.parent / _MANIFEST_FILE).exists() else {}


def unsound(folder: Path, problems: Sequence[str]) -> CheckpointError:
    """The error of a checkpoint that is not as it was written."""
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
        raise CheckpointError(f"{path} is torn or not of this version: {_said(error)}\n{_advice(folder)}") from error
    outside = [name for name in manifest.files if PurePosixPath(name).is_absolute() or ".." in name.split("/")]
    if outside:
        raise CheckpointError(f"{path} names files outside of the checkpoint: {_listed(outside)}\n{_advice(folder)}")
    return manifest


def _said(error: ValidationError) -> str:
    """The first of what pydantic says, without the value."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}".removeprefix(": ")


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n".join([*lines[:_MAX_LINES], *more])


def _advice(folder: Path) -> str:
    return f"remove {folder} to resume from the checkpoint before it"
