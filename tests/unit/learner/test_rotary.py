"""Rotary frequencies against transformers' own, and what the learner refuses to build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner.model.refusals import refuse
from rl_megatron.models.families.common import read_rope
from rl_megatron.models.named import NAMED
from rl_megatron.models.rotary import inverse_frequencies
from rl_megatron.models.shape import Router
from rl_megatron.options.implementation import torch_only

LLAMA31 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPT_OSS = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    "parameters",
    [
        {**LLAMA31, "original_max_position_embeddings": 8192},
        {**GPT_OSS, "original_max_position_embeddings": 4096, "truncate": False},
        {**DEEPSEEK, "original_max_position_embeddings": 4096},
        {**DEEPSEEK, "original_max_position_embeddings": 4096, "mscale": 0.707},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ],
)
def test_frequencies_are_transformers_own(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        head_dim=64, hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    raw = {"rope_parameters": parameters, "max_position_embeddings": 131072}
    theta, rope = read_rope(raw, Path("config.json"), head_dim=64)
    found = inverse_frequencies(theta, 64, rope, torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


SHAPE = NAMED["qwen3-30b-a3b"]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (replace(SHAPE, router=Router(score="sigmoid"), normalize_top_k=False), {}, "norm_topk_prob=False: megatron"),
        (replace(SHAPE, router=Router(groups=8, top_groups=2)), {}, "num_experts_per_tok / topk_group = 8 / 2 = 4"),
        (replace(SHAPE, expert_bias=True), {"tp": 2}, "learner.etp=2: experts with biases cannot be sharded"),
    ],
)
def test_what_megatron_would_get_wrong_is_refused(shape: Any, options: dict[str, int], message: str) -> None:
    refuse(SHAPE, LearnerSection())
    with pytest.raises(ConfigError, match=message):
        refuse(shape, LearnerSection.model_validate(options))


def test_parts_that_transformer_engine_lacks_are_named() -> None:
    assert torch_only(SHAPE) is None
    assert torch_only(replace(SHAPE, windows=(0, 128))) == "sliding windows"
    assert torch_only(replace(SHAPE, qk_norm="all")) == "norms over all heads"
