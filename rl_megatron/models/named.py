"""Shapes of public models by name, for plans that need no files of the model. Sources: each model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import DeltaNet, Indexer, LatentAttention, ModelShape, Rope, Router

_QWEN3_235B_A22B = ModelShape(
    num_layers=94,
    hidden_size=4096,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_width=1536,
    vocab_size=151936,
    rope_theta=1e6,
    norm_eps=1e-6,
    normalize_top_k=True,
    tie_embeddings=False,
    max_positions=40960,
)
_DEEPSEEK_V3 = ModelShape(
    family="deepseek_v3",
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    num_experts=256,
    experts_per_token=8,
    expert_width=2048,
    vocab_size=129280,
    rope_theta=1e4,
    norm_eps=1e-6,
    normalize_top_k=True,
    tie_embeddings=False,
    max_positions=163840,
    latent=LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    dense_layers=3,
    dense_width=18432,
    shared_width=2048,
    rope=Rope(kind="yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0),
    router=Router(score="sigmoid", selection_bias=True, groups=8, top_groups=4, scaling=2.5),
    qk_norm=None,
    draft_layers=1,
)
NAMED: Mapping[str, ModelShape] = {
    "qwen3-30b-a3b": replace(_QWEN3_235B_A22B, num_layers=48, hidden_size=2048, num_heads=32, expert_width=768),
    "qwen3-235b-a22b": _QWEN3_235B_A22B,
    "qwen3-next-80b-a3b": replace(
        _QWEN3_235B_A22B,
        family="qwen3_next",
        num_layers=48,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_experts=512,
        experts_per_token=10,
        expert_width=512,
        shared_width=512,
        rope_theta=1e7,
        max_positions=262144,
        rope=Rope(dim=64),
        delta=DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4),
        delta_layers=tuple(layer for layer in range(48) if layer % 4 != 3),
        output_gate=True,
        shared_gate=True,
        zero_centered=True,
        draft_layers=1,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.2": replace(
        _DEEPSEEK_V3,
        family="deepseek_v32",
        indexer=Indexer(heads=64, head_dim=128, top_k=2048, layers=tuple(range(61))),
    ),
    "glm-5": replace(
        _DEEPSEEK_V3,
        family="glm_moe_dsa",
        num_layers=78,
        hidden_size=6144,
        num_heads=64,
        num_kv_heads=64,
        head_dim=256,
        vocab_size=154880,
        rope_theta=1e6,
        norm_eps=1e-5,
        max_positions=202752,
        latent=LatentAttention(query_rank=2048, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256),
        dense_width=12288,
        rope=Rope(),
        router=Router(score="sigmoid", selection_bias=True, scaling=2.5),
        indexer=Indexer(heads=32, head_dim=128, top_k=2048, layers=tuple(range(78))),
    ),
    "hunyuan-3": replace(
        _QWEN3_235B_A22B,
        family="hy_v3",
        num_layers=80,
        num_kv_heads=8,
        num_experts=192,
        vocab_size=120832,
        rope_theta=11_158_840.0,
        norm_eps=1e-5,
        max_positions=131072,
        dense_layers=1,
        dense_width=13312,
        shared_width=1536,
        router=Router(score="sigmoid", selection_bias=True, scaling=2.826),
    ),
    "kimi-k2": replace(
        _DEEPSEEK_V3,
        family="kimi_k2",
        num_heads=64,
        num_kv_heads=64,
        num_experts=384,
        vocab_size=163840,
        rope_theta=5e4,
        max_positions=131072,
        dense_layers=1,
        rope=Rope(kind="yarn", factor=32.0, original_positions=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
        router=Router(score="sigmoid", selection_bias=True, scaling=2.827),
        draft_layers=0,
    ),
}
"""Shapes by name; DeepSeek-V3's leaves out the multi-token-prediction module after the decoder."""

_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "experts_per_token",
    "expert_width",
    "dense_layers",
    "vocab_size",
)


def expect(name: str | None, shape: ModelShape) -> None:
    """Raises ConfigError if ``shape`` does not have the sizes of the public model ``name``; None accepts any."""
    if name is None:
        return
    if name not in NAMED:
        raise ConfigError(f"model.name={name}: not a known model; known: {', '.join(NAMED)}")
    wanted = NAMED[name]
    pairs = [(size, getattr(shape, size), getattr(wanted, size)) for size in _SIZES]
    differ = [f"{size} {found} instead of {right}" for size, found, right in pairs if found != right]
    if differ:
        raise ConfigError(
            f"model.path holds another model than model.name={name}: {', '.join(differ)}; give the folder of {name}, "
            "or start from another configuration"
        )
