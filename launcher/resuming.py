"""What a resume starts from: the last whole checkpoint of a run with the same configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_megatron import checkpoints, config_io
from rl_megatron.config import RunConfig
from rl_megatron.errors import CheckpointError

_MAY_CHANGE = (
    *("run", "train", "eval", "checkpoint", "log", "learner", "roles", "slurm"),
    *("model.cache_dir", "rollout.slots"),
)


def find(config: RunConfig, run_folder: Path) -> checkpoints.Checkpoint | None:
    """Where the run in ``run_folder`` continues; None where it was killed before its first checkpoint.

    Raises CheckpointError that names what is torn, missing, or configured otherwise than before.
    """
    latest = checkpoints.CheckpointStore(run_folder / "checkpoints", keep=config.checkpoint.keep).latest()
    saved = run_folder / "config.yaml"
    if latest is None and not saved.exists():  # killed before it wrote anything
        return None
    if not saved.is_file():
        raise CheckpointError(f"{saved} is missing; without it nobody knows what {latest} is a checkpoint of")
    _check_same(config, config_io.load(str(saved), []), saved)
    return None if latest is None else checkpoints.read(latest)


def _check_same(config: RunConfig, before: RunConfig, saved: Path) -> None:
    """A resume may change lengths, logging and the layout; anything else would be another run under the same name."""
    now, then = (dict(_flat(c.model_dump(mode="json"))) for c in (config, before))
    changed = [
        f"{key}: {_shown(then, key)} then, {_shown(now, key)} now"
        for key in {**then, **now}
        if now.get(key) != then.get(key) and not any(f"{key}.".startswith(f"{may}.") for may in _MAY_CHANGE)
    ]
    if config.learner.dims.ep != before.learner.dims.ep:
        changed.append(
            f"learner.ep: {before.learner.dims.ep} then, {config.learner.dims.ep} now (megatron-core 0.16.1 cannot "
            "reshard the optimizer's state over another expert-parallel degree)"
        )
    if changed:
        raise CheckpointError(
            "--resume with another configuration:\n" + "\n".join(changed) + f"\nto go on as before: --config {saved}"
        )


def _flat(section: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not there"
