"""The rows of every model family, by Hugging Face's ``model_type``: the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, split_layers
from rl_megatron.weights.layouts.tables import (
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``tables`` has rows for ``hf``, ``megatron`` and, where plans know engines of it, ``engine``.

    ``trains``: the learner builds it; ``serves``: so does the engine of this repository, ``rollout.local``.
    """

    tables: Mapping[str, Sequence[ParamSpec]]
    trains: bool = True
    serves: bool = False


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(tables=qwen2.TABLES),
    "qwen3": Family(tables=qwen3.TABLES),
    "qwen3_moe": Family(tables=qwen3_moe.TABLES, serves=True),
    "llama": Family(tables=llama.TABLES),
    "mistral": Family(tables=llama.TABLES),
    "mixtral": Family(tables=mixtral.TABLES),
    "glm4_moe": Family(tables=glm4_moe.TABLES),
    "gpt_oss": Family(tables=gpt_oss.TABLES),
    "minimax_m2": Family(tables=minimax_m2.TABLES),
    "deepseek_v2": Family(tables=deepseek_v3.TABLES_V2),
    "deepseek_v3": Family(tables=deepseek_v3.TABLES),
    "kimi_k2": Family(tables=deepseek_v3.TABLES),
}
"""``models.configs`` reads each one's config.json."""


def family_of(shape: ModelShape) -> Family:
    """The rows of a shape's family. Raises ConfigError where there are none."""
    if shape.family not in FAMILIES:
        raise ConfigError(f"model_type={shape.family!r} has no tables; those with tables: {', '.join(FAMILIES)}")
    return FAMILIES[shape.family]


def hf_layout(shape: ModelShape, dims: ParallelDims | None = None) -> Layout:
    """The checkpoint on disk, or ``dims.dp`` full copies under its names."""
    return Layout(table=family_of(shape).tables["hf"], shape=shape, dims=dims or ParallelDims())


def megatron_layout(
    shape: ModelShape,
    dims: ParallelDims | None = None,
    *,
    vocab_multiple: int = 8,
    first: int | None = None,
    last: int | None = None,
) -> Layout:
    """The learner's ranks; ``first`` and ``last`` are layers of those stages where they differ from the others.

    Raises ConfigError naming each size that a degree does not divide.
    """
    table, dims = family_of(shape).tables["megatron"], dims or ParallelDims()
    stages = split_layers(shape.num_layers, dims.pp, first=first, last=last) if first or last else None
    return Layout(table=table, shape=shape, dims=dims, stages=stages, vocab_multiple=vocab_multiple)
