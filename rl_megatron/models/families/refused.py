"""Why models of other families are refused, by their ``model_type``. Sources: transformers ``models/``."""

from __future__ import annotations

from collections.abc import Mapping

_MAMBA = "its mamba layers are not computed here"
_FACTORS = "factors of its config.json multiply embeddings, residuals and logits, which is not computed here"
_POSITIONS = "its queries are scaled by their positions, which is not computed here"
_TOWER = "of models for images and text, only Qwen3.5-MoE's and Kimi-K2.5's text models are read"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("nemotron_h", "granitemoehybrid", "jamba", "bamba", "falcon_h1", "zamba", "zamba2", "mamba2"), _MAMBA
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _FACTORS),
    "ernie4_5_moe": "its routers add a bias to softmax scores, which megatron-core 0.16 does with sigmoids alone",
    **dict.fromkeys(("mistral3", "mistral4"), _POSITIONS),
    "deepseek_v4": "its compressed attention and its several residual streams are not computed here",
    "glm5_next": "its several residual streams and its linear attention are not computed here",
    "qwen4_exp": "its gated residuals and the indexer of its attention are not computed here",
    "kimi_linear": "its layers of Kimi delta attention are not computed here",
    "mimo_v2_flash": "its layers with windows have heads of other numbers and sizes than the rest",
    "afmoe": "it has four norms a layer, of which two are not computed here",
    **dict.fromkeys(
        ("qwen3_vl_moe", "qwen3_vl", "glm4v_moe", "llama4", "gemma3", "ernie4_5_vl_moe", "minimax_m3_vl", "step3p7"),
        _TOWER,
    ),
}
