"""Reads Hunyuan 3's config.json. Source: transformers ``models/hy_v3``; vLLM reads the published keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, dense_first, given, refuse_others
from rl_megatron.models.shape import ModelShape, Router


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Hunyuan 3: norms of heads, dense layers first, sigmoid scores with a bias for the choice, one shared expert."""
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
        shared_width=given(raw, "num_shared_experts", 1) * width,
        router=Router(score="sigmoid", selection_bias=True, scaling=float(given(raw, "router_scaling_factor", 2.826))),
        draft_layers=raw.get("num_nextn_predict_layers") or 0,
    )
