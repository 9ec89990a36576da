"""The paths of a run's files, in and beside its folder."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.files import weights_folder


def mirror_path(config: RunConfig, run_folder: Path) -> Path:
    """The mirror file of this run's weights for servers, the same path on each node that has one."""
    return _mirror(config, run_folder, _name(run_folder))


def drawn_mirror_path(config: RunConfig, folder: Path) -> Path:
    """A mirror file of one process alone, beside which others may serve models from the same folder."""
    return _mirror(config, folder, secrets.token_hex(8))


def _name(run_folder: Path) -> str:
    return hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]


def _mirror(config: RunConfig, folder: Path, name: str) -> Path:
    return (weights_folder(config) or folder.resolve()) / f"rl_megatron-{name}" / "model.safetensors"
