"""The paths of a run's files, in and beside its folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.nodes import engines_elsewhere


def mirror_path(config: RunConfig, run_folder: Path) -> Path:
    """The mirror file of this run's weights for servers; on a shared disk if a server is on another node."""
    digest = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    usual = run_folder.resolve() if engines_elsewhere(config) else Path("/dev/shm")
    folder = config.weights.folder or usual
    return folder / f"rl_megatron-{digest}" / "model.safetensors"
