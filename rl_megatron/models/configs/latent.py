"""Readers of the families with multi-head latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError
from rl_megatron.models.configs.common import read_rope, refuse_others
from rl_megatron.models.shape import LatentAttention, ModelShape, Router


def deepseek_v3(raw: dict[str, Any], path: Path) -> ModelShape:
    """DeepSeek-V3 and Kimi-K2."""
    refuse_others(raw, path, {"attention_bias": False, "moe_layer_freq": 1, "hidden_act": "silu"})
    if raw.get("q_lora_rank") is None:
        raise ConfigError(f"{path}: q_lora_rank={raw.get('q_lora_rank')!r} is not supported; it must be a number")
    latent = LatentAttention(
        query_rank=raw["q_lora_rank"],
        kv_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
    )
    theta, rope = read_rope(raw, path, head_dim=latent.rope_dim)
    return ModelShape(
        family=raw["model_type"],
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_attention_heads"],
        head_dim=latent.nope_dim + latent.rope_dim,
        num_experts=raw.get("n_routed_experts") or raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        vocab_size=raw["vocab_size"],
        rope_theta=theta,
        norm_eps=raw["rms_norm_eps"],
        normalize_top_k=raw["norm_topk_prob"],
        tie_embeddings=raw["tie_word_embeddings"],
        max_positions=raw["max_position_embeddings"],
        latent=latent,
        dense_layers=raw["first_k_dense_replace"],
        dense_width=raw["intermediate_size"],
        shared_width=raw["n_shared_experts"] * raw["moe_intermediate_size"],
        rope=rope,
        router=Router(
            score="sigmoid",
            selection_bias=True,
            groups=raw.get("n_group") or 1,
            top_groups=raw.get("topk_group") or 1,
            scaling=float(raw.get("routed_scaling_factor", 1.0)),
        ),
        qk_norm=None,
        draft_layers=raw.get("num_nextn_predict_layers") or 0,
    )
