"""Reads Qwen3's config.json. Source: transformers ``models/qwen3``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_fields, refuse_others
from rl_megatron.models.shape import ModelShape


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen3 without experts."""
    refuse_others(raw, path, {**SILU, "use_sliding_window": False, "attention_bias": False})
    return ModelShape(**decoder_fields(raw, path, head_dim=raw.get("head_dim") or 128), **dense_fields(raw))
