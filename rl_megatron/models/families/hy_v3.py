"""Reads Hunyuan 3's config.json. Source: transformers ``models/hy_v3``; vLLM reads the published keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_first, refuse_others, with_defaults
from rl_megatron.models.shape import ModelShape, Router

_DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 11_158_840.0,
    "num_shared_experts": 1,
    "router_scaling_factor": 2.826,
}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Hunyuan 3: norms of heads, dense layers first, sigmoid scores with a bias for the choice, one shared expert."""
    raw = with_defaults(raw, _DEFAULTS)
    fixed = {"attention_bias": False, "mlp_bias": False, "qk_norm": True, "route_norm": True}
    refuse_others(raw, path, {**SILU, **fixed, "moe_router_use_sigmoid": True})
    width = raw.get("moe_intermediate_size") or raw["expert_hidden_dim"]
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=width,
        normalize_top_k=True,
        dense_layers=dense_first(raw, path, 1),
        dense_width=raw["intermediate_size"],
        shared_width=raw["num_shared_experts"] * width,
        router=Router(score="sigmoid", selection_bias=True, scaling=float(raw["router_scaling_factor"])),
        draft_layers=raw.get("num_nextn_predict_layers") or 0,
    )
