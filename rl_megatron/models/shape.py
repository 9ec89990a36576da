"""Sizes of a decoder, read from a Hugging Face ``config.json``. Plain integers, no torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); the last three are a head's."""

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one mixture-of-experts decoder, global (not per rank), in Hugging Face's meaning.

    Qwen3-MoE needs the fields without a default. ``latent`` and those behind it are DeepSeek-V3's and Kimi-K2's, which
    only weight plans know so far: the first ``dense_layers`` have one MLP of ``dense_width`` and no experts, the others
    shared experts of ``shared_width`` in all.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    normalize_top_k: bool
    tie_embeddings: bool
    max_positions: int
    latent: LatentAttention | None = None
    dense_layers: int = 0
    dense_width: int = 0
    shared_width: int = 0

    @property
    def active_parameters(self) -> int:
        """Weights that a token of a Qwen3-MoE is multiplied with: its experts only, the output layer included."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        experts = 3 * self.experts_per_token * self.expert_width + self.num_experts
        return self.hidden_size * (self.num_layers * (attention + experts) + self.vocab_size)

    @staticmethod
    def from_folder(folder: Path, *, families: Collection[str] = ("qwen3_moe",)) -> ModelShape:
        """The shape of the checkpoint in ``folder``. Raises ConfigError for a model_type not among ``families``."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"model.path={folder}: no config.json there; give a Hugging Face checkpoint folder")
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw.get("model_type") not in families:
            allowed = ", ".join(repr(family) for family in families)
            raise ConfigError(f"{path}: model_type={raw.get('model_type')!r} is not supported; allowed: {allowed}")
        return _qwen3_moe(raw, path) if raw["model_type"] == "qwen3_moe" else _deepseek_v3(raw, path)


def _qwen3_moe(raw: dict[str, Any], path: Path) -> ModelShape:
    _refuse_others(raw, path, {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False})
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or raw.get("rope_scaling"):
        raise ConfigError(f"{path}: scaled rotary embeddings are not supported; allowed: rope_type='default'")
    return ModelShape(
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        num_experts=raw.get("num_experts") or raw["num_local_experts"],  # transformers 5 writes the second
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        vocab_size=raw["vocab_size"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        norm_eps=raw["rms_norm_eps"],
        normalize_top_k=raw["norm_topk_prob"],
        tie_embeddings=raw["tie_word_embeddings"],
        max_positions=raw["max_position_embeddings"],
    )


def _deepseek_v3(raw: dict[str, Any], path: Path) -> ModelShape:
    _refuse_others(raw, path, {"attention_bias": False, "moe_layer_freq": 1})
    if raw.get("q_lora_rank") is None:
        raise ConfigError(f"{path}: q_lora_rank={raw.get('q_lora_rank')!r} is not supported; it must be a number")
    latent = LatentAttention(
        query_rank=raw["q_lora_rank"],
        kv_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
    )
    return ModelShape(
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_attention_heads"],
        head_dim=latent.nope_dim + latent.rope_dim,
        num_experts=raw.get("n_routed_experts") or raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        vocab_size=raw["vocab_size"],
        rope_theta=float((raw.get("rope_parameters") or {}).get("rope_theta") or raw.get("rope_theta") or 10000.0),
        norm_eps=raw["rms_norm_eps"],
        normalize_top_k=raw["norm_topk_prob"],
        tie_embeddings=raw["tie_word_embeddings"],
        max_positions=raw["max_position_embeddings"],
        latent=latent,
        dense_layers=raw["first_k_dense_replace"],
        dense_width=raw["intermediate_size"],
        shared_width=raw["n_shared_experts"] * raw["moe_intermediate_size"],
    )


def _refuse_others(raw: dict[str, Any], path: Path, fixed: dict[str, object]) -> None:
    for key, wanted in fixed.items():
        if raw.get(key) not in (wanted, None):
            raise ConfigError(f"{path}: {key}={raw[key]!r} is not supported; allowed: {wanted!r}")
