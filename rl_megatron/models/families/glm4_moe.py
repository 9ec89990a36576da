"""Reads GLM-4.5's and 4.6's config.json. Source: transformers ``models/glm4_moe``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, refuse_others, with_defaults
from rl_megatron.models.shape import ModelShape, Router

_DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """GLM-4.5 and 4.6: half of a head turns, the first layers are dense, the router's scores are sigmoids."""
    raw = with_defaults(raw, _DEFAULTS)
    refuse_others(raw, path, SILU)
    return ModelShape(
        **decoder_fields(raw, path, turns_part=True),
        num_experts=raw.get("n_routed_experts") or raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        normalize_top_k=raw["norm_topk_prob"],
        dense_layers=raw["first_k_dense_replace"],
        dense_width=raw["intermediate_size"],
        shared_width=raw["n_shared_experts"] * raw["moe_intermediate_size"],
        router=Router(
            score="sigmoid",
            selection_bias=True,
            groups=raw.get("n_group") or 1,
            top_groups=raw.get("topk_group") or 1,
            scaling=float(raw["routed_scaling_factor"]),
        ),
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm="head" if raw.get("use_qk_norm") else None,
        draft_layers=raw.get("num_nextn_predict_layers") or 0,
    )
