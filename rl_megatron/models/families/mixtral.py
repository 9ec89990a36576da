"""Reads Mixtral's config.json. Source: transformers ``models/mixtral``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, refuse_others, windows, with_defaults
from rl_megatron.models.shape import ModelShape

_DEFAULTS: Mapping[str, object] = {"num_key_value_heads": 8, "rope_theta": 1e6}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Mixtral: the weights of the chosen experts add up to 1."""
    raw = with_defaults(raw, _DEFAULTS)
    refuse_others(raw, path, {**SILU, "router_jitter_noise": 0.0})
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=True,
        qk_norm=None,
        windows=windows(raw, path),
    )
