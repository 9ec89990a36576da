"""The parsers by name."""

from __future__ import annotations

from types import MappingProxyType

from rl_megatron.rollout.parsers.deepseek import deepseek
from rl_megatron.rollout.parsers.glm import glm
from rl_megatron.rollout.parsers.harmony import harmony
from rl_megatron.rollout.parsers.hermes import hermes
from rl_megatron.rollout.parsers.llama3 import llama3
from rl_megatron.rollout.parsers.parsed import Parser

PARSERS: MappingProxyType[str, Parser] = MappingProxyType(
    {"hermes": hermes, "llama3_json": llama3, "deepseek": deepseek, "glm": glm, "harmony": harmony}
)
WRITTEN: MappingProxyType[str, str] = MappingProxyType(
    {"hermes": "<tool_call>", "deepseek": "<｜tool▁calls▁begin｜>", "glm": "<arg_key>", "harmony": "<|channel|>"}
)
"""What every call of a format has in it, where it is more than JSON."""
