"""Which of the two kinds a checkpoint folder is, and how large."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.errors import ConfigError


def total_bytes(folder: Path) -> int:
    """Bytes of weights in a checkpoint of either kind, for a progress display."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.distcp") for path in folder.glob(pattern))


def is_megatron(folder: Path) -> bool:
    """Whether the folder is a ``torch_dist`` checkpoint. Raises ConfigError if it is of neither kind."""
    if (folder / ".metadata").is_file():
        return True
    if (folder / "config.json").is_file():
        return False
    raise ConfigError(f"{folder}: it has neither .metadata (megatron torch_dist) nor config.json (Hugging Face)")
