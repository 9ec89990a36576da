"""The one table of engines that are servers."""

from __future__ import annotations

from collections.abc import Mapping

from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.servers.sglang.adapter import SGLangAdapter
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter
from rl_megatron.weights.servers.probe import PROBE_LENGTH

SERVERS: Mapping[str, type[SGLangAdapter] | type[VLLMAdapter]] = {"sglang": SGLangAdapter, "vllm": VLLMAdapter}


def longest_sequence(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of the longest prompt and completion, a probe's among them."""
    longest = max(config.rollout.max_prompt_tokens + config.rollout.max_new_tokens, PROBE_LENGTH)
    return min(longest, shape.max_positions)
