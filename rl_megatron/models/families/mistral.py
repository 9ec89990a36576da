"""Reads Mistral's config.json. Source: transformers ``models/mistral``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_fields, refuse_others, windows
from rl_megatron.models.shape import ModelShape


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Mistral; a sliding window is of every layer."""
    refuse_others(raw, path, SILU)
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, windows=windows(raw, path))
