"""Finds the checkpoint for a resume: the last whole one of a run with the same configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.config.resume import changes_no_step, defaults, fixed, is_free
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import CheckpointError, shorten
from rl_megatron.training import checkpoints

_MAX_LINES = 20


def find(config: RunConfig, run_folder: Path) -> checkpoints.Checkpoint | None:
    """Where the run in ``run_folder`` continues; None where it has no checkpoint yet, and starts over.

    Raises CheckpointError that names what is torn, missing, or configured otherwise than in what was trained.
    """
    latest = checkpoints.latest(run_folder / "checkpoints")
    if latest is None:
        return None
    found = checkpoints.read(latest)
    _check_same(fixed(config), defaults(config), found.config, latest)
    return found


def _check_same(now: Mapping[str, Any], usual: Mapping[str, Any], then: Mapping[str, Any], folder: Path) -> None:
    lacked = {key: value for key, value in usual.items() if key in now}  # older versions lack new keys
    then = {**lacked, **{key: value for key, value in then.items() if not is_free(key)}}  # and hold others fixed
    changed = [
        f"{key}: {_shown(then, key)} then, {_shown(now, key)} now"
        for key in {**then, **now}
        if key not in now or key not in then or (now[key] != then[key] and not changes_no_step(key, then, now))
    ]
    if len(changed) > _MAX_LINES:
        changed[_MAX_LINES:] = [f"and {len(changed) - _MAX_LINES} more"]
    if changed:
        raise CheckpointError(
            f"--resume with another configuration than {folder} was trained with:\n"
            + "\n".join(changed)
            + "\ngive these as they were, or another run.name; docs/running.md says what may change"
        )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return shorten(values[key]) if key in values else "not there"
