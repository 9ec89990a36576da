"""Reads Mistral's config.json. Source: transformers ``models/mistral``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_fields, refuse_others, windows, with_defaults
from rl_megatron.models.shape import ModelShape

_DEFAULTS: Mapping[str, object] = {"num_key_value_heads": 8, "sliding_window": 4096}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Mistral; a sliding window is of every layer."""
    raw = with_defaults(raw, _DEFAULTS)
    refuse_others(raw, path, SILU)
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, windows=windows(raw, path))
