"""``config.json`` of every known ``model_type`` -> ModelShape. A reader refuses what its family's rows do not cover."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_megatron.models.configs import grouped, latent
from rl_megatron.models.shape import ModelShape

Reader = Callable[[dict[str, Any], Path], ModelShape]

READERS: Mapping[str, Reader] = {
    "qwen2": grouped.qwen2,
    "qwen3": grouped.qwen3,
    "qwen3_moe": grouped.qwen3_moe,
    "llama": grouped.llama,
    "mistral": grouped.mistral,
    "mixtral": grouped.mixtral,
    "glm4_moe": grouped.glm4_moe,
    "gpt_oss": grouped.gpt_oss,
    "minimax_m2": grouped.minimax_m2,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "kimi_k2": latent.deepseek_v3,
}
"""What each raises is a ConfigError that names the file, the key, what it holds and what is allowed."""
