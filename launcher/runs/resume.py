"""Finds the checkpoint for a resume: the last whole one of a run with the same configuration.

Records in a run's starts.jsonl, a row a start, which code and which versions it ran with, and tells a resume's.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rl_megatron
from rl_megatron.config.errors import is_removed_key
from rl_megatron.config.removed import is_off, is_removed, removed_key, renamed
from rl_megatron.config.resume import FREE_BEFORE, changes_rows_only, defaults, fixed, flat, is_free
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import CheckpointError, quote_start, truncate
from rl_megatron.observability.files import JsonlFile, JsonRow, whole_rows
from rl_megatron.observability.history import STARTS
from rl_megatron.training import checkpoints
from rl_megatron.weights.formats.hf_folder import weight_files

logger = logging.getLogger(__name__)

START_FOLDER = "hf_start"
"""Folder, in a run's, of the model that training starts from, if it is the frozen reference."""
_MAX_LINES = 20
_MOST_PATH = 500  # characters of a path; two paths may differ at the end


def find(config: RunConfig, run_folder: Path) -> checkpoints.Checkpoint | None:
    """Returns the checkpoint from which the run in ``run_folder`` continues; None if it has none yet, and starts over.

    Raises CheckpointError that names torn or missing files, keys that differ from the trained run's, or ``train.steps``
    below the steps already made.
    """
    latest = checkpoints.latest(run_folder / "checkpoints")
    if latest is None:
        return None
    found = checkpoints.read(latest)
    paths = {key for key, value in flat(config.model_dump()) if isinstance(value, Path)}
    _check_same(fixed(config), defaults(config), found.config, latest, paths)
    made, steps = found.state.step, config.train.steps
    if config.written_epochs is None and steps < made:
        raise CheckpointError(
            f"train.steps={steps}, but {latest} is of step {made}; give train.steps={made} or more, or another run.name"
        )
    begun = found.state.warm_start_step is None
    kept = config.needs_reference and not config.reference_is_base and not config.reference_moves
    if begun and kept and config.reference is None:
        _check_reference(config, run_folder / START_FOLDER)
    return found


def has_trained(run_folder: Path) -> bool:
    """True if an earlier start has recorded a row, perhaps without a checkpoint: its options let it train."""
    metrics = run_folder / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _check_reference(config: RunConfig, folder: Path) -> None:
    """Raises CheckpointError if the reference that the run kept at its start lacks files."""
    try:
        weight_files(folder)
    except CheckpointError as error:
        path, remedy = config.model.path, "put it back"
        if path is not None and not (config.warm_start.steps or config.model.random_weights):
            remedy += f", or copy model.path={path} there"
        raise CheckpointError(
            f"{error.args[0].partition(';')[0]}. It is the model that this run started from, its frozen reference "
            f"(algorithm.kl.reference=null); {remedy}, or begin another run.name"
        ) from error


def _is_held(key: str) -> bool:
    """True if a free section had this removed key, and only its fixed values describe the current behavior."""
    row = removed_key(key)
    return row is not None and not any(map(is_off, row.fixed))


def _check_same(
    now: Mapping[str, Any], usual: Mapping[str, Any], then: Mapping[str, Any], folder: Path, paths: Set[str]
) -> None:
    """Raises CheckpointError if keys differ. Older versions lack new keys, hold free ones, and removed ones if off.

    ``paths``: the keys with a path as value.
    """
    lacked = {key: now[key] if key in FREE_BEFORE else value for key, value in usual.items() if key in now}
    held, then = then, {**lacked, **{key: value for key, value in then.items() if not is_free(key) or _is_held(key)}}
    for key in [key for key in then if key not in now]:
        if (name := renamed(key)) is not None and (name in now or is_free(name)):
            logger.warning("%s: %s is now called %s", folder, key, name)
            old = then.pop(key)
            if name in now and (old is not None or name not in held):  # an older version may hold both
                then[name] = old
    gone = {key: value for key, value in then.items() if key not in now and is_removed_key(key)}
    dropped = {
        key: value
        for key, value in gone.items()
        if is_removed(key, value, now.get) or (removed_key(key) is None and is_off(value))
    }
    for key, value in dropped.items():
        logger.warning("%s: dropped: %s", folder, _removed_key_note(key, value))
    changed = [_removed_key_note(key, value) for key, value in gone.items() if key not in dropped] + [
        f"{key}: {_shown(then, key, paths)} then, {_shown(now, key, paths)} now"
        for key in {**then, **now}
        if key not in gone
        and (key not in now or key not in then or (now[key] != then[key] and not changes_rows_only(key, then, now)))
    ]
    moved = any(then.get(key) and now[key] != then[key] for key in paths & now.keys())
    if len(changed) > _MAX_LINES:
        changed[_MAX_LINES:] = [f"and {len(changed) - _MAX_LINES} more"]
    if changed:
        advice = "resume with the version that wrote it" if gone.keys() > dropped.keys() else "give these as they were"
        if moved:
            advice += " (if files moved, make a link or a mount at the old path)"
        raise CheckpointError(
            f"--resume with a different configuration from {folder}:\n"
            + "\n".join(changed)
            + f"\n{advice}, or begin another run.name; docs/cluster.md says what may change"
        )


def _removed_key_note(key: str, value: object) -> str:
    row = removed_key(key)
    return f"{key}: {quote_start(value)} then, now no such key{f'; {row.advice}' if row else ''}"


def _shown(values: Mapping[str, Any], key: str, paths: Set[str]) -> str:
    if key not in values:
        return "not there"
    return truncate(repr(values[key]), _MOST_PATH) if key in paths else quote_start(values[key])


PACKAGES = (
    *("rl-megatron", "torch", "megatron-core", "transformer-engine", "transformers", "tokenizers", "safetensors"),
    *("numpy", "ray", "vllm", "sglang"),
)
"""The distributions whose versions a row tells, where they are installed."""
_GIT_SECONDS = 10.0


def record_start(run_folder: Path, *, step: int, engine: Path | None) -> list[str]:
    """Appends the row of a start from ``step``. Returns a line for each damaged row, which is left out, and then a line
    for each version that differs from the start before.

    ``engine``: an interpreter of this machine that servers run with, if that is another. Controller's process. Raises
    OSError that names the file.
    """
    path = run_folder / STARTS
    file = JsonlFile(path)
    file.cut_torn()
    damaged = list[str]()
    before = whole_rows(path, damaged.append) if path.is_file() else []
    now: JsonRow = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), **_versions(engine)}
    file.append([now])
    file.close()
    return [f"{why}; the run continues without it" for why in damaged] + (_changes(before[-1], now) if before else [])


def _changes(before: JsonRow, now: JsonRow) -> list[str]:
    return [
        f"{name} is {now.get(name, 'not there')}; this run's last start, from step {before['step']}, had "
        f"{before.get(name, 'none')}"
        for name in dict.fromkeys((*before, *now))
        if name not in ("step", "time") and before.get(name) != now.get(name)
    ]


def _versions(engine: Path | None) -> dict[str, str]:
    """Returns versions of code and packages, by name; an engine's from its own environment, if on this machine."""
    found, own = {"python": platform.python_version()}, Path(rl_megatron.__file__).parent
    tracked = _git(own, "ls-files", "__init__.py")  # an installed one may be inside the repository of other code
    commits = {"code/rl_megatron": _commit(own) if tracked else "", "code/here": _commit(Path.cwd())}
    for name, commit in commits.items():
        if commit and commit not in found.values():
            found[name] = commit
    for name in PACKAGES:
        if version := _installed(name, sys.path):
            found[name] = version
    if engine is not None:
        folders = [*map(str, engine.parent.parent.glob("lib/python3.*/site-packages"))]
        for name in PACKAGES:
            if version := _installed(name, folders):
                found[f"engine/{name}"] = version
    return found


def _installed(name: str, folders: list[str]) -> str:
    """Returns the version of a distribution in one of these folders; empty if there is none."""
    return next((one.version for one in importlib.metadata.distributions(name=name, path=folders)), "")


def _commit(folder: Path) -> str:
    """Returns the commit of a folder of a git repository, and whether files differ from it. Empty if git reports none,
    for example because it is not installed, or refuses another user's folder."""
    commit, changed = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    if not commit or changed is None:
        return ""
    return f"{commit}, with changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns git's output about the folder; None if git fails. It takes no lock that a user's git would meet."""
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            env=dict(os.environ),
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
