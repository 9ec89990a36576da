"""The paths in, and beside, a run's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.nodes import engines_elsewhere


def mirror_path(config: RunConfig, run_folder: Path) -> Path:
    """The file in which this run's weights are handed to servers: where those on other nodes see it, if there are."""
    digest = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    usual = run_folder.resolve() if engines_elsewhere(config) else Path("/dev/shm")
    folder = config.weights.folder or usual
    return folder / f"rl_megatron-{digest}" / "model.safetensors"
