"""Reads Llama's config.json. Source: transformers ``models/llama``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_fields, refuse_others
from rl_megatron.models.shape import ModelShape


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Llama 2 and 3, with scaled rotary embeddings or without."""
    refuse_others(raw, path, {**SILU, "attention_bias": False, "mlp_bias": False})
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None)
