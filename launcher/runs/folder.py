"""The paths of a run's files, in and beside its folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.files import weights_folder


def mirror_path(config: RunConfig, run_folder: Path) -> Path:
    """The mirror file of this run's weights for servers, the same path on each node that has one."""
    digest = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return (weights_folder(config) or run_folder.resolve()) / f"rl_megatron-{digest}" / "model.safetensors"
