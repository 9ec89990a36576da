"""Reads MiniMax-M2's config.json. Source: transformers ``models/minimax_m2``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, refuse_others
from rl_megatron.models.shape import ModelShape, Router


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """MiniMax-M2: norms over all heads at once, part of a head turns, the router's scores are sigmoids."""
    fixed = {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0}
    refuse_others(raw, path, {**SILU, **fixed, "qk_norm_type": "per_layer", "router_jitter_noise": 0.0})
    turning = raw.get("rotary_dim")
    part = turning / raw["head_dim"] if turning else None
    return ModelShape(
        **decoder_fields(raw, path, part=part),
        num_experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=True,
        router=Router(score="sigmoid", selection_bias=True),
        qk_norm="all",
        draft_layers=raw.get("num_mtp_modules") or 0 if raw.get("use_mtp") else 0,
    )
