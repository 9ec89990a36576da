"""Reads Qwen2's and Qwen2.5's config.json. Source: transformers ``models/qwen2``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_fields, refuse_others, with_defaults
from rl_megatron.models.shape import ModelShape

_DEFAULTS: Mapping[str, object] = {"num_key_value_heads": 32}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen2 and Qwen2.5, also as text models behind others."""
    raw = with_defaults(raw, _DEFAULTS)
    refuse_others(raw, path, {**SILU, "use_sliding_window": False})
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, qkv_bias=True)
