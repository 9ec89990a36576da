"""Reads config.json of DeepSeek-V2, V3, V3.2, Kimi-K2 and K2.5, GLM-4.7-Flash and GLM-5.

Sources: transformers ``models/deepseek_{v2,v3,v32}``, ``glm4_moe_lite``, ``glm_moe_dsa`` and ``kimi_k25``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError, quote_start
from rl_megatron.models.families.common import (
    dense_first,
    read_rope,
    require_fixed_values,
    text_model,
    value_or_default,
    with_defaults,
)
from rl_megatron.models.shape import Indexer, LatentAttention, ModelShape, Router

_FIXED: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rope_interleave": True,
}
_V3: Mapping[str, object] = {**_FIXED, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
_V2_DEFAULTS: Mapping[str, object] = {
    "q_lora_rank": 1536,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
_V3_DEFAULTS: Mapping[str, object] = {
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
_GLM_DEFAULTS: Mapping[str, object] = {"q_lora_rank": 768, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
_INDEXED_DEFAULTS: Mapping[str, object] = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
}
_V32_DEFAULTS: Mapping[str, object] = {
    **_INDEXED_DEFAULTS,
    "n_group": 8,
    "topk_group": 4,
    "indexer_rope_interleave": False,
}


def read_v2(raw: dict[str, Any], path: Path) -> ModelShape:
    """DeepSeek-V2 and V2-Lite: softmax scores, which are not made to add up to 1; groups are rated by their best."""
    require_fixed_values(raw, path, {**_FIXED, "scoring_func": "softmax", "norm_topk_prob": False})
    raw = with_defaults(raw, _V2_DEFAULTS)
    method = raw["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{path}: topk_method={quote_start(method)} is not supported; allowed: 'greedy', 'group_limited_greedy'"
        )
    router = Router(scaling=float(raw["routed_scaling_factor"]))
    if method == "group_limited_greedy":
        router = _grouped(raw, router, "max")
    return _decoder(raw, path, router=router, normalize_top_k=False, dense=raw["first_k_dense_replace"])


def read_v3(raw: dict[str, Any], path: Path) -> ModelShape:
    """DeepSeek-V3 and Kimi-K2: sigmoid scores and a bias for the choice; groups are rated by their two best."""
    require_fixed_values(raw, path, _V3)
    raw = with_defaults(raw, _V3_DEFAULTS)
    router = Router(score="sigmoid", selection_bias=True, scaling=float(raw["routed_scaling_factor"]))
    router, dense = _grouped(raw, router, "top2"), raw["first_k_dense_replace"]
    return _decoder(raw, path, router=router, normalize_top_k=True, dense=dense)


def read_kimi(raw: dict[str, Any], path: Path) -> ModelShape:
    """Kimi-K2.5: Kimi-K2 with a tower for images. The whole's class ties the embedding by default, the text's not."""
    _ = raw["tie_word_embeddings"]
    return replace(
        read_v3(text_model(raw, path), path), draft_layers=0, other_prefixes=("vision_tower.", "mm_projector.")
    )


def read_glm(raw: dict[str, Any], path: Path) -> ModelShape:
    """GLM-4.7-Flash: DeepSeek-V3 with ``mlp_layer_types``, which may be ``first_k_dense_replace`` as in V3."""
    require_fixed_values(raw, path, _V3)
    raw = with_defaults(raw, _GLM_DEFAULTS)
    router = Router(score="sigmoid", selection_bias=True, scaling=float(raw["routed_scaling_factor"]))
    dense = dense_first(raw, path, 1)
    return _decoder(raw, path, router=_grouped(raw, router, "top2"), normalize_top_k=True, dense=dense)


def read_indexed(raw: dict[str, Any], path: Path) -> ModelShape:
    """DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention has an indexer, in all layers or, in GLM-5.2, in some."""
    require_fixed_values(raw, path, _V3)
    raw = with_defaults(raw, _V32_DEFAULTS if raw["model_type"] == "deepseek_v32" else _INDEXED_DEFAULTS)
    router = Router(score="sigmoid", selection_bias=True, scaling=float(raw["routed_scaling_factor"]))
    kinds, _ = _indexers(raw, path), raw["q_lora_rank"]  # the indexer's queries are made of that latent
    indexer = Indexer(
        heads=raw["index_n_heads"],
        head_dim=raw["index_head_dim"],
        top_k=raw["index_topk"],
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "full"),
        interleaved=raw["indexer_rope_interleave"],
    )
    dense = dense_first(raw, path, 3)
    return replace(
        _decoder(raw, path, router=_grouped(raw, router, "top2"), normalize_top_k=True, dense=dense), indexer=indexer
    )


def _indexers(raw: Mapping[str, Any], path: Path) -> Sequence[str]:
    """The kind of each layer, "full" or "shared": from a list, their initials, or every so many from an offset on."""
    layers = raw["num_hidden_layers"]
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        every, first = (
            max(1, value_or_default(raw, "index_topk_freq", 1)),
            value_or_default(raw, "index_skip_topk_offset", 2),
        )
        kinds = ["shared" if max(0, layer - first + 1) % every else "full" for layer in range(layers)]
    if isinstance(kinds, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in kinds]
    if set(kinds) - {"full", "shared"} or len(kinds) != layers:
        raise ConfigError(
            f"{path}: indexer_types={quote_start(kinds)} is not supported; allowed: 'full' or 'shared' for each of "
            f"{layers} layers"
        )
    return kinds


def _grouped(raw: Mapping[str, Any], router: Router, score: Any) -> Router:
    groups = raw.get("n_group") or 1
    if groups == 1:
        return router
    return replace(router, groups=groups, top_groups=raw.get("topk_group") or 1, group_score=score)


def _decoder(raw: dict[str, Any], path: Path, *, router: Router, normalize_top_k: bool, dense: int) -> ModelShape:
    latent = LatentAttention(
        query_rank=raw.get("q_lora_rank"),
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
        normalize_top_k=normalize_top_k,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_positions=raw["max_position_embeddings"],
        latent=latent,
        dense_layers=dense,
        dense_width=raw["intermediate_size"],
        shared_width=raw["n_shared_experts"] * raw["moe_intermediate_size"],
        rope=rope,
        router=router,
        qk_norm=None,
        draft_layers=raw.get("num_nextn_predict_layers") or 0,
    )
