"""``weights.delta``: only the bytes that changed since the last version are sent over a process group."""

from __future__ import annotations

from rl_megatron.feature import Feature

FEATURE = Feature(name="sparse", compression="rl_megatron.features.sparse.changes:compression")
