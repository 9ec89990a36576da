"""Reads gpt-oss' config.json. Source: transformers ``models/gpt_oss``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import SILU, decoder_fields, refuse_others, windows, with_defaults
from rl_megatron.models.shape import ModelShape, Router

_DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rope_theta": 1.5e5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """gpt-oss: every other layer sees a window, each head has a sink, all linears but the output's have biases."""
    raw = with_defaults(raw, _DEFAULTS)
    refuse_others(raw, path, {**SILU, "attention_bias": True, "swiglu_alpha": 1.702})
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(raw["num_hidden_layers"])]
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=True,
        router=Router(logit_bias=True),
        qkv_bias=True,
        out_bias=True,
        qk_norm=None,
        sinks=True,
        windows=windows(raw, path, kinds),
        expert_bias=True,
        clamped_swiglu=float(raw["swiglu_limit"]),
    )
