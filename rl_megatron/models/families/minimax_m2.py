"""Reads MiniMax-M2's config.json. Source: transformers ``models/minimax_m2``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, refuse_others, with_defaults
from rl_megatron.models.shape import ModelShape, Router

_DEFAULTS: Mapping[str, object] = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """MiniMax-M2: norms over all heads at once, part of a head turns, the router's scores are sigmoids."""
    raw = with_defaults(raw, _DEFAULTS)
    fixed = {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0}
    refuse_others(raw, path, {**SILU, **fixed, "qk_norm_type": "per_layer", "router_jitter_noise": 0.0})
    if raw.get("rotary_dim"):
        raw = with_defaults(raw, {"partial_rotary_factor": raw["rotary_dim"] / raw["head_dim"]})
    return ModelShape(
        **decoder_fields(raw, path, turns_part=True),
        num_experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=True,
        router=Router(score="sigmoid", selection_bias=True),
        qk_norm="all",
        draft_layers=raw.get("num_mtp_modules") or 0 if raw.get("use_mtp") else 0,
    )
