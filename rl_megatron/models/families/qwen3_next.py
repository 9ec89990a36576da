"""Reads config.json of Qwen3-Next and of Qwen3.5-MoE's text model.

Sources: transformers ``models/qwen3_next`` and ``models/qwen3_5_moe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError, quote_start
from rl_megatron.models.families.common import SILU, decoder_fields, require_fixed_values, text_model, with_defaults
from rl_megatron.models.shape import DeltaNet, ModelShape

_DELTA, _FULL = "linear_attention", "full_attention"

_DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
}


def read(raw: dict[str, Any], path: Path) -> ModelShape:
    """Delta nets in three of four layers or as ``layer_types`` says, gated attention in the others, experts in all.

    Qwen3-Next's config.json does not say that its files have a draft layer.
    """
    raw = with_defaults(raw, _DEFAULTS)
    require_fixed_values(raw, path, {**SILU, "attention_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 1})
    if raw["model_type"] != "qwen3_next":
        require_fixed_values(raw, path, {"norm_topk_prob": True})  # Qwen3.5's class does not read it
    kinds = _kinds(raw, path)
    return ModelShape(
        **decoder_fields(raw, path, turns_part=True),
        num_experts=raw.get("num_experts") or raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        shared_width=raw["shared_expert_intermediate_size"],
        normalize_top_k=raw["norm_topk_prob"],
        delta=DeltaNet(
            key_heads=raw["linear_num_key_heads"],
            value_heads=raw["linear_num_value_heads"],
            key_dim=raw["linear_key_head_dim"],
            value_dim=raw["linear_value_head_dim"],
            kernel=raw["linear_conv_kernel_dim"],
        ),
        delta_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _DELTA),
        output_gate=True,
        shared_gate=True,
        zero_centered=True,
        draft_layers=raw["mtp_num_hidden_layers"],
    )


def read_text_model(raw: dict[str, Any], path: Path) -> ModelShape:
    """Returns the text model of Qwen3.5-MoE for images and text."""
    return replace(read(text_model(raw, path), path), other_prefixes=("model.visual.",))


def _kinds(raw: Mapping[str, Any], path: Path) -> list[str]:
    layers = raw["num_hidden_layers"]
    kinds: list[str] | None = raw.get("layer_types")
    if not kinds:
        every = raw["full_attention_interval"]
        kinds = [_DELTA if (n + 1) % every else _FULL for n in range(layers)]
    if set(kinds) - {_DELTA, _FULL} or len(kinds) != layers:
        raise ConfigError(
            f"{path}: layer_types={quote_start(kinds)} is not supported; allowed: {_DELTA!r} or {_FULL!r} for each of "
            f"{layers} layers"
        )
    return kinds
