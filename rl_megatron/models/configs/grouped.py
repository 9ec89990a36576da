"""Readers of the families with grouped-query attention. Sources: transformers ``models/<model_type>/configuration_*``.

transformers drops from a file what equals its default only in some versions, so a missing key means that default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_megatron.config.errors import shorten
from rl_megatron.errors import ConfigError
from rl_megatron.models.configs.common import decoder_fields, dense_fields, refuse_others
from rl_megatron.models.shape import ModelShape, Router

_SILU: Mapping[str, object] = {"hidden_act": "silu"}


def _given(raw: Mapping[str, Any], key: str, default: float) -> Any:
    return default if raw.get(key) is None else raw[key]


def _windows(raw: Mapping[str, Any], path: Path, kinds: Sequence[str] | None = None) -> tuple[int, ...]:
    """Sliding windows by layer, from ``layer_types`` or, without them, ``kinds``, or for all layers."""
    window, layers = int(raw.get("sliding_window") or 0), int(raw["num_hidden_layers"])
    kinds = raw.get("layer_types") or kinds
    if not window or raw.get("use_sliding_window") is False:
        return ()
    if kinds is None:
        return (window,) * layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"{path}: layer_types={shorten(kinds)} is not supported; allowed: 'full_attention' or "
            f"'sliding_attention' for each of {layers} layers"
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def qwen2(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen2 and Qwen2.5, also as text models behind others."""
    refuse_others(raw, path, {**_SILU, "use_sliding_window": False})
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, qkv_bias=True)


def qwen3(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen3 without experts."""
    refuse_others(raw, path, {**_SILU, "use_sliding_window": False, "attention_bias": False})
    return ModelShape(**decoder_fields(raw, path, head_dim=raw.get("head_dim") or 128), **dense_fields(raw))


def qwen3_moe(raw: dict[str, Any], path: Path) -> ModelShape:
    """Qwen3 with experts in every layer."""
    fixed = {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False, "attention_bias": False}
    refuse_others(raw, path, {**_SILU, **fixed})
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw.get("num_experts") or raw["num_local_experts"],  # transformers 5 writes the second
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        normalize_top_k=raw["norm_topk_prob"],
    )


def llama(raw: dict[str, Any], path: Path) -> ModelShape:
    """Llama 2 and 3, with scaled rotary embeddings or without."""
    refuse_others(raw, path, {**_SILU, "attention_bias": False, "mlp_bias": False})
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None)


def mistral(raw: dict[str, Any], path: Path) -> ModelShape:
    """Mistral; a sliding window is of every layer."""
    refuse_others(raw, path, _SILU)
    return ModelShape(**decoder_fields(raw, path), **dense_fields(raw), qk_norm=None, windows=_windows(raw, path))


def mixtral(raw: dict[str, Any], path: Path) -> ModelShape:
    """Mixtral: the weights of the chosen experts add up to 1."""
    refuse_others(raw, path, {**_SILU, "router_jitter_noise": 0.0})
    return ModelShape(
        **decoder_fields(raw, path),
        num_experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["intermediate_size"],
        normalize_top_k=True,
        qk_norm=None,
        windows=_windows(raw, path),
    )


def glm4_moe(raw: dict[str, Any], path: Path) -> ModelShape:
    """GLM-4.5 and 4.6: half of a head turns, the first layers are dense, the router's scores are sigmoids."""
    refuse_others(raw, path, _SILU)
    return ModelShape(
        **decoder_fields(raw, path, part=0.5),
        num_experts=raw.get("n_routed_experts") or raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        normalize_top_k=bool(_given(raw, "norm_topk_prob", True)),
        dense_layers=raw["first_k_dense_replace"],
        dense_width=raw["intermediate_size"],
        shared_width=raw["n_shared_experts"] * raw["moe_intermediate_size"],
        router=Router(
            score="sigmoid",
            selection_bias=True,
            groups=raw.get("n_group") or 1,
            top_groups=raw.get("topk_group") or 1,
            scaling=float(_given(raw, "routed_scaling_factor", 1.0)),
        ),
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm="head" if raw.get("use_qk_norm") else None,
        draft_layers=raw.get("num_nextn_predict_layers") or 0,
    )


def gpt_oss(raw: dict[str, Any], path: Path) -> ModelShape:
    """gpt-oss: every other layer sees a window, each head has a sink, all linears but the output's have biases."""
    refuse_others(raw, path, {**_SILU, "attention_bias": True, "swiglu_alpha": 1.702})
    if "quantization_config" in raw:
        kind = (raw.get("quantization_config") or {}).get("quant_method")
        raise ConfigError(
            f"{path}: quant_method={shorten(kind)} is not supported; convert the checkpoint to bfloat16 first"
        )
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
        windows=_windows(raw, path, kinds),
        expert_bias=True,
        clamped_swiglu=float(_given(raw, "swiglu_limit", 7.0)),
    )


def minimax_m2(raw: dict[str, Any], path: Path) -> ModelShape:
    """MiniMax-M2: norms over all heads at once, part of a head turns, the router's scores are sigmoids."""
    fixed = {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0}
    refuse_others(raw, path, {**_SILU, **fixed, "qk_norm_type": "per_layer", "router_jitter_noise": 0.0})
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
