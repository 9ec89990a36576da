"""Sizes of a small model of experts, for tests of layouts, plans and checkpoints."""

from __future__ import annotations

from rl_megatron.models.shape import ModelShape

SMALL_MOE = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_experts=4,
    experts_per_token=2,
    expert_width=6,
    vocab_size=21,
    rope_theta=1e4,
    norm_eps=1e-6,
    normalize_top_k=True,
    tie_embeddings=False,
    max_positions=64,
)
