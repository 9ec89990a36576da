"""The table of engines that are servers, and the adapter of the configured one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.servers.adapter import Adapter
from rl_megatron.rollout.servers.embedded.adapter import EmbeddedAdapter
from rl_megatron.rollout.servers.sglang.adapter import SGLangAdapter
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter
from rl_megatron.user_code import load_named
from rl_megatron.weights.servers.probe import PROBE_LENGTH

SERVERS: Mapping[str, Callable[[ModelShape], Adapter]] = {
    "sglang": SGLangAdapter,
    "vllm": VLLMAdapter,
}
"""Engines of others, whose interpreters are theirs."""
_ALL: Mapping[str, Callable[[ModelShape], Adapter]] = {"local": EmbeddedAdapter, **SERVERS}


def adapter_of(engine: str, shape: ModelShape) -> Adapter:
    """The adapter of ``rollout.engine``. Raises ConfigError if the user's own cannot be loaded."""
    make = _ALL.get(engine) or load_named(engine, "rollout.engine", "class", callable)
    adapter: Adapter = make(shape)
    return adapter


def longest_sequence(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of the longest prompt and completion, including a probe's."""
    longest = max(config.rollout.max_prompt_tokens + config.longest_completion, PROBE_LENGTH)
    return min(longest, shape.max_positions)
