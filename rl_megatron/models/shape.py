"""Sizes of a decoder, read from a Hugging Face ``config.json``. Plain integers, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one Qwen3-MoE decoder, global (not per rank), in Hugging Face's meaning."""

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

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: its experts only, the output layer included."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        experts = 3 * self.experts_per_token * self.expert_width + self.num_experts
        return self.hidden_size * (self.num_layers * (attention + experts) + self.vocab_size)

    @staticmethod
    def from_folder(folder: Path) -> ModelShape:
        """The shape of the checkpoint in ``folder``. Raises ConfigError for a family we cannot build."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"model.path={folder}: no config.json there; give a Hugging Face checkpoint folder")
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw.get("model_type") != "qwen3_moe":
            raise ConfigError(f"{path}: model_type={raw.get('model_type')!r} is not supported; allowed: 'qwen3_moe'")
        fixed: dict[str, object] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False}
        for key, wanted in fixed.items():
            if raw.get(key) not in (wanted, None):
                raise ConfigError(f"{path}: {key}={raw[key]!r} is not supported; allowed: {wanted!r}")
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
