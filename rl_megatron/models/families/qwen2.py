"""Reads Qwen2's and Qwen2.5's config.json. Source: transformers ``models/qwen2``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_fields, refuse_others
from rl_megatron.models.shape import ModelShape


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen2 and Qwen2.5, also as text models behind others."""
    refuse_others(raw, path, {**SILU, "use_sliding_window": False})
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, qkv_bias=True)
