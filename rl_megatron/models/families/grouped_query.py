"""Reads config.json of families with grouped-query attention, each a few keys apart from the others.

Sources: transformers ``models/``, each folder of the reader's name. vLLM reads the published keys of Hunyuan 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.families.common import (
    SILU,
    decoder_fields,
    dense_fields,
    dense_first,
    require_fixed_values,
    windows,
    with_defaults,
)
from rl_megatron.models.shape import ModelShape, Router


def _checked(raw: dict[str, Any], path: Path, defaults: Mapping[str, object], **fixed: object) -> dict[str, Any]:
    """Returns the keys with ``defaults`` for missing ones. Raises ConfigError for values other than the ``fixed``."""
    raw = with_defaults(raw, defaults)
    require_fixed_values(raw, path, {**SILU, **fixed})
    return raw


def read_llama(raw: dict[str, Any], path: Path) -> ModelShape:
    """Llama 2 and 3, with scaled rotary embeddings or without."""
    raw = _checked(raw, path, {}, attention_bias=False, mlp_bias=False)
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None)


def read_mistral(raw: dict[str, Any], path: Path) -> ModelShape:
    """Mistral; a sliding window is of every layer."""
    raw = _checked(raw, path, {"num_key_value_heads": 8, "sliding_window": 4096})
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, windows=windows(raw, path))


def read_qwen2(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen2 and Qwen2.5, also as text models inside others."""
    raw = _checked(raw, path, {"num_key_value_heads": 32}, use_sliding_window=False)
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, qkv_bias=True)


def read_qwen3(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen3 without experts."""
    raw = _checked(
        raw, path, {"num_key_value_heads": 32, "head_dim": 128}, use_sliding_window=False, attention_bias=False
    )
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw))


def read_qwen3_moe(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen3 with experts in every layer."""
    every = {"mlp_only_layers": [], "decoder_sparse_step": 1}  # layer has experts
    raw = _checked(raw, path, {"num_key_value_heads": 4}, use_sliding_window=False, attention_bias=False, **every)
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw.get("num_experts") or raw["num_local_experts"],  # transformers 5 writes the second
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        normalize_top_k=raw["norm_topk_prob"],
    )


def read_mixtral(raw: dict[str, Any], path: Path) -> ModelShape:
    """Mixtral: the weights of the chosen experts add up to 1."""
    raw = _checked(raw, path, {"num_key_value_heads": 8, "rope_theta": 1e6}, router_jitter_noise=0.0)
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=True,
        qk_norm=None,
        windows=windows(raw, path),
    )


def read_olmoe(raw: dict[str, Any], path: Path) -> ModelShape:
    """OLMoE: norms over all heads together; the chosen experts' softmax scores do not add up to 1 unless it says so."""
    raw = _checked(raw, path, {}, attention_bias=False, clip_qkv=None)
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw.get("num_experts") or raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=bool(raw.get("norm_topk_prob")),
        qk_norm="all",
    )


def read_glm4_moe(raw: dict[str, Any], path: Path) -> ModelShape:
    """GLM-4.5 and 4.6: half of a head turns, the first layers are dense, the router's scores are sigmoids."""
    defaults: Mapping[str, object] = {
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    raw = _checked(raw, path, defaults)
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


def read_gpt_oss(raw: dict[str, Any], path: Path) -> ModelShape:
    """gpt-oss: every other layer sees a window, each head has a sink, all linears but the output's have biases."""
    defaults: Mapping[str, object] = {
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
    raw = _checked(raw, path, defaults, attention_bias=True, swiglu_alpha=1.702)
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


def read_hy_v3(raw: dict[str, Any], path: Path) -> ModelShape:
    """Hunyuan 3: norms of heads, dense layers first, sigmoid scores with a bias for the choice, one shared expert."""
    defaults: Mapping[str, object] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 11_158_840.0,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
    }
    router = {"route_norm": True, "moe_router_use_sigmoid": True}
    raw = _checked(raw, path, defaults, attention_bias=False, mlp_bias=False, qk_norm=True, **router)
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


def read_minimax_m2(raw: dict[str, Any], path: Path) -> ModelShape:
    """MiniMax-M2: norms over all heads together, part of a head turns, the router's scores are sigmoids."""
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6}
    router = {"scoring_func": "sigmoid", "use_routing_bias": True, "router_jitter_noise": 0.0}
    norms = {"use_qk_norm": True, "qk_norm_type": "per_layer"}
    raw = _checked(raw, path, defaults, shared_intermediate_size=0, **router, **norms)
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
