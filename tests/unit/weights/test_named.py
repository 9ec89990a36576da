"""Public models by name: against their config.json, read as a folder's, and the parameters that their cards state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rl_megatron.models.named import NAMED
from rl_megatron.weights.layouts.families import FAMILIES, megatron_layout, read_shape
from rl_megatron.weights.layouts.learner import elements

LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def turning(theta: float, part: float = 1.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}}


def sizes(layers: int, hidden: int, heads: int, kv: int, width: int, **more: Any) -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return dict(zip(names, (layers, hidden, heads, kv, width), strict=True)) | more


QWEN25 = {"vocab_size": 152064, "max_position_embeddings": 131072, **turning(1e6)}
QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, **turning(1e6)}
QWEN3_MOE = QWEN3 | {"head_dim": 128, "norm_topk_prob": True}
QWEN35 = {"max_position_embeddings": 262144, **turning(1e7, 0.25)}
LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}
GLM = {"attention_bias": True, "num_nextn_predict_layers": 1, **turning(1e6, 0.5)}
KIMI = {"n_routed_experts": 384, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840}
KIMI |= sizes(61, 7168, 64, 64, 18432, **LATENT, n_group=1, topk_group=1, num_nextn_predict_layers=0)
K2 = {**YARN, "factor": 32.0, "beta_fast": 1.0, "rope_theta": 5e4}
K25 = {**YARN, "factor": 64.0, "beta_fast": 32.0, "rope_theta": 5e4}
PUBLISHED: Mapping[str, tuple[float, str | None, Mapping[str, Any]]] = {
    "qwen3-30b-a3b": (30.5, "qwen3_moe", QWEN3_MOE | sizes(48, 2048, 32, 4, 6144)),
    "qwen3-235b-a22b": (235, "qwen3_moe", QWEN3_MOE | sizes(94, 4096, 64, 4, 12288, moe_intermediate_size=1536)),
    "qwen3-next-80b-a3b": (80, "qwen3_next", QWEN35),
    "qwen3.5-35b-a3b": (35, "qwen3_5_moe", QWEN35),
    "qwen3.5-397b-a17b": (
        397,
        "qwen3_5_moe",
        {
            **QWEN35,
            "num_hidden_layers": 60,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "linear_num_value_heads": 64,
        },
    ),
    "qwen3-8b": (8.2, "qwen3", QWEN3 | sizes(36, 4096, 32, 8, 12288)),
    "qwen3-32b": (32.8, "qwen3", QWEN3 | sizes(64, 5120, 64, 8, 25600)),
    "qwen2.5-7b": (7.61, "qwen2", QWEN25 | sizes(28, 3584, 28, 4, 18944)),
    "qwen2.5-32b": (32.5, "qwen2", QWEN25 | sizes(64, 5120, 40, 8, 27648)),
    "llama-3.1-8b": (8.03, "llama", LLAMA | sizes(32, 4096, 32, 8, 14336)),
    "llama-3.1-70b": (70.6, "llama", LLAMA | sizes(80, 8192, 64, 8, 28672)),
    "mistral-7b-v0.3": (
        7.25,
        "mistral",
        sizes(32, 4096, 32, 8, 14336, vocab_size=32768, max_position_embeddings=32768, sliding_window=None)
        | {"rms_norm_eps": 1e-5, **turning(1e6)},
    ),
    "mixtral-8x7b": (46.7, "mixtral", {"max_position_embeddings": 32768, **turning(1e6)}),
    "olmoe-1b-7b": (6.9, "olmoe", {"intermediate_size": 1024}),
    "gpt-oss-20b": (20.9, "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": (116.8, "gpt_oss", {}),
    "minimax-m2": (230, "minimax_m2", {"use_mtp": True, "num_mtp_modules": 3, **turning(5e6, 0.5)}),
    "glm-4.5": (
        355,
        "glm4_moe",
        GLM
        | sizes(92, 5120, 96, 8, 12288, n_routed_experts=160, moe_intermediate_size=1536, first_k_dense_replace=3)
        | {"use_qk_norm": True, "routed_scaling_factor": 2.5, "head_dim": 128},
    ),
    "glm-4.5-air": (106, "glm4_moe", GLM | {"head_dim": 128}),
    "glm-4.7-flash": (30, "glm4_moe_lite", {"num_nextn_predict_layers": 1, **turning(1e6)}),
    "deepseek-v2-lite": (
        15.7,
        "deepseek_v2",
        sizes(27, 2048, 16, 16, 10944, **LATENT, q_lora_rank=None, moe_intermediate_size=1408, num_experts_per_tok=6)
        | {"first_k_dense_replace": 1, "max_position_embeddings": 163840}
        | {"rope_parameters": {**YARN, "factor": 40.0, "rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": (
        671,
        "deepseek_v3",
        sizes(61, 7168, 128, 128, 18432, **LATENT, num_nextn_predict_layers=1, max_position_embeddings=163840)
        | {"rope_parameters": {**YARN, "factor": 40.0, "rope_theta": 1e4}},
    ),
    "deepseek-v3.2": (671, None, {}),  # test_families.py has these two
    "glm-5": (744, None, {}),
    "hunyuan-3": (295, "hy_v3", {}),
    "kimi-k2": (1026, "kimi_k2", KIMI | {"max_position_embeddings": 131072, "rope_parameters": K2}),  # the card: 1T
    "kimi-k2.5": (
        1026,
        "kimi_k25",
        KIMI | {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_parameters": K25},
    ),
}
"""Name -> (10^9 parameters, model_type, the keys of config.json that differ from those of transformers' class)."""


@pytest.mark.parametrize("name", NAMED)
def test_a_named_model_is_its_card(name: str, tmp_path: Path) -> None:
    named, (billions, kind, keys) = NAMED[name], PUBLISHED[name]
    assert elements(megatron_layout(named), 0).both == pytest.approx(billions * 1e9, rel=0.01)
    if kind is None:
        return
    known = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "qwen3_5_moe": "qwen3_5_moe_text"}.get(kind, kind)
    raw = json.loads(AutoConfig.for_model(known, **keys).to_json_string()) | keys | {"model_type": kind}
    if named.other_prefixes:
        raw = {"model_type": kind, "tie_word_embeddings": False, "text_config": raw}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_shape(tmp_path) == replace(named, stacked_experts=False)  # as tensors of files are


def test_every_family_has_a_name() -> None:
    """Qwen3.5's two model types differ in the names of files' tensors."""
    assert {*FAMILIES} - {"qwen3_5_moe_text"} == {shape.family for shape in NAMED.values()}
