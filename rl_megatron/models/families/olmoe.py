"""Reads OLMoE's config.json. Source: transformers ``models/olmoe``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, refuse_others
from rl_megatron.models.shape import ModelShape


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """OLMoE: norms over all heads at once; the chosen experts' softmax scores do not add up to 1 unless it says so."""
    refuse_others(raw, path, {**SILU, "attention_bias": False, "clip_qkv": None})
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw.get("num_experts") or raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=bool(raw.get("norm_topk_prob")),
        qk_norm="all",
    )
