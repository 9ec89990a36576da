"""Sizes of small models of experts: SMALL_MOE for layouts, plans and checkpoints, TINY_MOE for a learner."""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.models.named import NAMED
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
TINY_MOE = replace(
    NAMED["qwen3-30b-a3b"],
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=8,
    experts_per_token=2,
    expert_width=32,
    vocab_size=259,
    max_positions=1024,
)
