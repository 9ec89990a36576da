"""Reads Qwen3-MoE's config.json. Source: transformers ``models/qwen3_moe``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, refuse_others, with_defaults
from rl_megatron.models.shape import ModelShape

_DEFAULTS: Mapping[str, object] = {"num_key_value_heads": 4}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen3 with experts in every layer."""
    raw = with_defaults(raw, _DEFAULTS)
    fixed = {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False, "attention_bias": False}
    refuse_others(raw, path, {**SILU, **fixed})
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw.get("num_experts") or raw["num_local_experts"],  # transformers 5 writes the second
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        normalize_top_k=raw["norm_topk_prob"],
    )
