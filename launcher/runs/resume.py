"""Finds the checkpoint for a resume: the last whole one of a run with the same configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from rl_megatron.config.beside import reference_follows
from rl_megatron.config.errors import has_gone
from rl_megatron.config.removed import is_off, is_removed, removed_key
from rl_megatron.config.resume import FREE_BEFORE, changes_no_step, defaults, fixed, flat, is_free
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import CheckpointError, cut_to, shorten
from rl_megatron.training import checkpoints
from rl_megatron.weights.formats.hf_folder import weight_files

logger = logging.getLogger(__name__)

START_FOLDER = "hf_start"
"""In a run's folder: the model that training starts from, where it is the frozen reference."""
_MAX_LINES = 20
_MOST_PATH = 500  # characters of one, of which two may differ at the end


def find(config: RunConfig, run_folder: Path) -> checkpoints.Checkpoint | None:
    """Where the run in ``run_folder`` continues; None where it has no checkpoint yet, and starts over.

    Raises CheckpointError that names what is torn, missing, or configured otherwise than in what was trained, or
    ``train.steps`` below the steps that are made.
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
    kept = config.needs_reference and not config.reference_is_base and not reference_follows(config)
    if begun and kept and config.reference is None:
        _check_reference(config, run_folder / START_FOLDER)
    return found


def has_trained(run_folder: Path) -> bool:
    """Whether a start before this one has recorded a row, perhaps without a checkpoint: its options let it train."""
    metrics = run_folder / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _check_reference(config: RunConfig, folder: Path) -> None:
    """Raises CheckpointError if the reference that the run kept at its start lacks files."""
    try:
        weight_files(folder)
    except CheckpointError as error:
        path, remedy = config.model.path, "put it back"
        if path is not None and not (config.warm_start.steps or config.model.random_weights):
            remedy += f", or copy model.path={path} there, which it is"
        raise CheckpointError(
            f"{error.args[0].partition(';')[0]}. It is the model that this run started from, its frozen reference "
            f"({config.reference_key}=null); {remedy}, or begin another run.name"
        ) from error


def _check_same(
    now: Mapping[str, Any], usual: Mapping[str, Any], then: Mapping[str, Any], folder: Path, paths: Set[str]
) -> None:
    """Older versions lack new keys, hold free ones, and have keys that this one does not have: those must be off.

    ``paths``: the keys whose value is one.
    """
    lacked = {key: now[key] if key in FREE_BEFORE else value for key, value in usual.items() if key in now}
    then = {**lacked, **{key: value for key, value in then.items() if not is_free(key)}}
    for key in [key for key in then if key not in now and not is_off(then[key])]:
        if (row := removed_key(key)) is not None and row.name is not None and row.name in now:
            logger.warning("%s: %s is called %s now", folder, key, row.name)
            then[row.name] = then.pop(key)
    gone = {key: value for key, value in then.items() if key not in now and has_gone(key)}
    dropped = {key: value for key, value in gone.items() if is_off(value) or is_removed(key, value)}
    for key, value in dropped.items():
        logger.warning("%s: %s=%s is dropped: this version has no such key, and does that", folder, key, shorten(value))
    changed = [_of_gone(key, value) for key, value in gone.items() if key not in dropped] + [
        f"{key}: {_shown(then, key, paths)} then, {_shown(now, key, paths)} now"
        for key in {**then, **now}
        if key not in gone
        and (key not in now or key not in then or (now[key] != then[key] and not changes_no_step(key, then, now)))
    ]
    moved = any(then.get(key) and now[key] != then[key] for key in paths & now.keys())
    if len(changed) > _MAX_LINES:
        changed[_MAX_LINES:] = [f"and {len(changed) - _MAX_LINES} more"]
    if changed:
        advice = "resume with the version that wrote it" if gone.keys() > dropped.keys() else "give these as they were"
        if moved:
            advice += " (what lies elsewhere now, by a link or a mount at the path then)"
        raise CheckpointError(
            f"--resume with another configuration than {folder} was trained with:\n"
            + "\n".join(changed)
            + f"\n{advice}, or begin another run.name; docs/running.md says what may change"
        )


def _of_gone(key: str, value: object) -> str:
    row = removed_key(key)
    return f"{key}: {shorten(value)} then, now no such key{f'; {row.advice}' if row else ''}"


def _shown(values: Mapping[str, Any], key: str, paths: Set[str]) -> str:
    if key not in values:
        return "not there"
    return cut_to(repr(values[key]), _MOST_PATH) if key in paths else shorten(values[key])
