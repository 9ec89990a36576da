"""Checkpoint folders: written under a temporary name, listed in a manifest, made durable, then renamed.

``checkpoints/step_000010/`` holds ``learner/`` and, where there is one, ``critic/`` (their shards), ``trainer.json``
(all that the controller must remember) and ``manifest.json`` (size and SHA-256 of every file).
``warm_start_000040/`` is the same, of a warm start that was stopped. A folder with its final name is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rl_megatron.credit import Memory
from rl_megatron.durable import publish_folder, remove_folder
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces import Learner
from rl_megatron.rollout.sampler import RolloutBatch

_NAME = re.compile(r"(warm_start|step)_(\d{6,})")
_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the controller remembers between steps. Random numbers are functions of (seed, step), so none is kept."""

    step: int  # finished RL steps; 0 is right after the warm start
    batches_sampled: int  # rollout batches taken from the prompts so far
    prompts: dict[str, int]  # PromptStream.state()
    buffer: tuple[RolloutBatch, ...]  # sampled, not yet trained on, oldest first
    memory: Memory | None = None  # the algorithm's; None in a warm start
    warm_start_step: int | None = None  # supervised steps done where they were stopped; ``prompts`` is then of theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    bytes: int
    sha256: str


_STATE = TypeAdapter(TrainerState)
_MANIFEST = TypeAdapter(dict[str, _File])


class CheckpointStore:
    """The checkpoints of one run. Controller process only."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep

    async def save(self, state: TrainerState, learners: Mapping[str, Learner]) -> Path:
        """Write a checkpoint, a folder for each of ``learners``, and drop the oldest beyond ``keep``.

        Killed at any moment, the last whole one stays.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(".*"):  # of a save that was killed
            shutil.rmtree(left)
        warm = state.warm_start_step
        final = self._folder / (f"step_{state.step:06d}" if warm is None else f"warm_start_{warm:06d}")
        temporary = self._folder / f"{_TEMPORARY}{final.name}"
        for name, learner in learners.items():
            (temporary / name).mkdir(parents=True)
            await learner.save(temporary / name)
        (temporary / "trainer.json").write_bytes(_STATE.dump_json(state))
        (temporary / "manifest.json").write_text(json.dumps(_manifest(temporary), indent=1))
        remove_folder(final)  # the same step again, after a resume: both are whole, and hold the same
        publish_folder(temporary, final)
        for old in self._all()[: -self._keep]:
            remove_folder(old)
        return final

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def _all(self) -> list[Path]:
        """Oldest first; a warm start comes before the steps."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        named = [(match[1] == "step", int(match[2]), p) for p in found if (match := _NAME.fullmatch(p.name))]
        return [path for _, _, path in sorted(named)]


def read(folder: Path) -> TrainerState:
    """The controller's part of a checkpoint, after every file was compared with the manifest.

    Raises CheckpointError naming each missing or changed file.
    """
    try:
        listed = _MANIFEST.validate_json((folder / "manifest.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{folder}/manifest.json is missing or torn: {error}\n{_advice(folder)}") from error
    problems = [p for name, entry in listed.items() for p in _compare(folder / name, entry)]
    if problems:
        raise CheckpointError("\n".join([*problems, _advice(folder)]))
    try:
        return _STATE.validate_json((folder / "trainer.json").read_bytes())
    except ValidationError as error:
        raise CheckpointError(f"{folder}/trainer.json is not of this version: {error}") from error


def _advice(folder: Path) -> str:
    return f"remove {folder} to resume from the checkpoint before it"


def _compare(path: Path, entry: _File) -> Iterator[str]:
    if not path.is_file():
        yield f"{path} is missing ({entry.bytes} bytes when it was written)"
    elif path.stat().st_size != entry.bytes:
        yield f"{path} is torn: {path.stat().st_size} bytes of {entry.bytes}"
    elif _digest(path) != entry.sha256:
        yield f"{path} changed since it was written: its SHA-256 differs"


def _manifest(folder: Path) -> dict[str, dict[str, str | int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
