"""A tiny random model of each family, as transformers makes and saves it, with nothing left at a telltale 0 or 1."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BASE: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GLM: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "n_shared_experts": 1,
    "attention_bias": True,
    "routed_scaling_factor": 1.5,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-2,  # the latents' norms have 1e-6 all the same
}
GLM_LITE: Mapping[str, Any] = {  # values are wider than the part of a key that does not turn
    **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    "v_head_dim": 14,
    "n_shared_experts": 1,
}
INDEXED: Mapping[str, Any] = {
    **LATENT,
    "n_shared_experts": 1,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "index_topk": 48,  # no sequence of a test is longer
}
DELTA: Mapping[str, Any] = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
}
TOWER: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
KIMI_TOWER: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("glm4_moe", {**GLM, "first_k_dense_replace": 1, "use_qk_norm": True}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6}},
    ),
    "deepseek_v2_grouped": (
        "deepseek_v2",
        {
            **LATENT,
            "num_experts_per_tok": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "moonlight": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "kimi_k2": (
        "deepseek_v3",
        {**LATENT, "n_group": 1, "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "kimi_k25": ("kimi_k25", {**LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "hy_v3": (
        "hy_v3",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "router_scaling_factor": 1.7,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "glm4_moe_air": ("glm4_moe", {**GLM, "first_k_dense_replace": 2, "n_shared_experts": 2, "use_qk_norm": False}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 5,
            "swiglu_limit": 1.0,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    "olmoe": (  # without the embedding's row that transformers would not train
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "pad_token_id": None},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**GLM_LITE, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "routed_scaling_factor": 1.8},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {**INDEXED, "n_group": 4, "topk_group": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6}},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", {**INDEXED, "indexer_types": ["full", "shared", "full", "shared"]}),
    "qwen3_next": ("qwen3_next", DELTA),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "qwen3_5_moe": ("qwen3_5_moe", {**DELTA, "layer_types": ["full_attention"] + ["linear_attention"] * 3}),
    "qwen3_5_moe_stacked": ("qwen3_5_moe", {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "glm4_moe_lite_straight": ("glm4_moe_lite", {**GLM_LITE, "q_lora_rank": None}),
}
"""Name -> (model_type, the settings that differ from BASE)."""


_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_moe": {"vision_config": TOWER},
    "kimi_k25": {"vision_config": KIMI_TOWER, "projection_hidden_size": 16, "tie_word_embeddings": False},
}
_OF_TEXT: Mapping[str, Mapping[str, Any]] = {"qwen3_5_moe": {}, "kimi_k25": {"model_type": "kimi_k2"}}


def config_of(name: str, **more: Any) -> Any:
    """Transformers' configuration of the model, with ``more`` settings of its text model."""
    from transformers import AutoConfig

    kind, differing = MODELS[name]
    text = {**BASE, **differing, **more}
    given = {"text_config": {**text, **_OF_TEXT[kind]}, **_TOWERS[kind]} if kind in _TOWERS else text
    return AutoConfig.for_model(kind, **given)


def save_model(name: str, folder: Path, **more: Any) -> Any:
    """Save the model in ``folder``, with ``more`` settings; its weights are so large that a wrong rope, bias or route
    shows."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind, differing = MODELS[name]
    torch.manual_seed(zlib.crc32(name.encode()))
    config = config_of(name, **more)
    loader = AutoModelForImageTextToText if kind in _TOWERS else AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key in model.state_dict():
                is_scale = key.endswith("norm.weight") and ("linear_num_key_heads" not in differing or "linear_" in key)
                value.normal_(1.0 if is_scale else 0.0, 0.3 if value.dim() == 1 else 0.25)
    write_model(name, model, folder)
    return model


def write_model(name: str, model: Any, folder: Path) -> None:
    """Write a model of `save_model` as published."""
    model.save_pretrained(folder)
    if name == "qwen3_5_moe_stacked":
        held = {key: value.contiguous() for key, value in model.state_dict().items()}  # as transformers computes
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    if name == "kimi_k25":  # as published: transformers calls the text model's layers as it does the tower's
        held = load_file(folder / "model.safetensors")
        names = {key: key.replace("language_model.model.blocks", "language_model.model.layers") for key in held}
        names = {key: new.replace("model.mm_projector", "mm_projector") for key, new in names.items()}
        save_file({names[key]: value for key, value in held.items()}, folder / "model.safetensors", {"format": "pt"})
    if name == "kimi_k2":  # transformers knows the model under DeepSeek's name alone
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": name}))


SPARSE = [name for name, (_, differing) in MODELS.items() if "num_experts_per_tok" in differing]
DENSE = [name for name in MODELS if name not in SPARSE]
