"""The registry of model families: reads a model's sizes from config.json, and builds layouts from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rl_megatron.errors import ConfigError, download_hint, quote_start
from rl_megatron.models.families.common import REFUSED
from rl_megatron.models.families.fields import CLASSIFIER, read_config
from rl_megatron.models.json_files import tensor_names
from rl_megatron.models.shape import STACKED, ModelShape, shape_problems
from rl_megatron.types import ParallelDims
from rl_megatron.user_code import load_named
from rl_megatron.weights.layouts.layout import Family, Layout, ParamSpec, shape_as_stored
from rl_megatron.weights.layouts.tables.deepseek_v3 import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, INDEXED, KIMI_K25
from rl_megatron.weights.layouts.tables.grouped_query import (
    GLM4_MOE,
    GPT_OSS,
    HY_V3,
    LLAMA,
    MINIMAX_M2,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
from rl_megatron.weights.layouts.tables.qwen3_next import QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_NEXT

_ALL = (
    *(QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, MIXTRAL, GLM4_MOE, GPT_OSS, MINIMAX_M2),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, INDEXED, KIMI_K25, HY_V3, OLMOE),
    *(QWEN3_NEXT, QWEN3_5_MOE_TEXT, QWEN3_5_MOE),
)
FAMILIES: Mapping[str, Family] = {model_type: family for family in _ALL for model_type in family.model_types}
"""Every family of this package by Hugging Face's ``model_type``."""


def read_shape(folder: Path, family: str | None = None) -> ModelShape:
    """The sizes of the model in a Hugging Face folder, read by the family of its ``model_type``, or by the user's own
    at ``family``, ``package.module:name``.

    A sequence classifier's scores, and has no logits. Raises ConfigError for an unknown ``model_type``, for an object
    that is not a `Family`, and as readers do.
    """
    known = FAMILIES if family is None else {name: _own(family) for name in _own(family).model_types}
    path = folder / "config.json"
    if not path.is_file():
        gone = "it has no config.json" if folder.is_dir() else f"there is no such folder, as seen from {Path.cwd()}"
        advice = adapter_folder_hint(folder) or f"give a Hugging Face checkpoint folder{download_hint(folder)}"
        raise ConfigError(f"model.path={folder}: {gone}; {advice}")
    raw = read_config(folder)
    model_type = raw.get("model_type")
    if model_type is None or model_type not in known:
        allowed = ", ".join(map(repr, known)) + (f", of {family}" if family else "")
        why = REFUSED.get(str(model_type))
        told = f"model_type={quote_start(model_type)} is not supported" + (f": {why}" if why else "")
        raise ConfigError(f"{path}: {told}; allowed: {allowed}")
    scores = any(name.endswith(CLASSIFIER) for name in raw.get("architectures") or ())
    shape = replace(known[model_type].read(raw, path), family=model_type, family_at=family)
    if scores:
        shape = replace(shape, has_score_head=True, tie_embeddings=False)
    if known[model_type].stacked is not None:
        experts, drafts = (bool(raw.get(key)) for key in STACKED)
        shape = shape_as_stored(replace(shape, stacked_experts=experts, stacked_drafts=drafts), tensor_names(folder))
    if found := list(shape_problems(shape)):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in found))
    return shape


def adapter_folder_hint(folder: Path) -> str:
    """Says what a folder of peft's adapters needs in place of weights. Empty for other folders."""
    if not (folder / "adapter_config.json").is_file():
        return ""
    return (
        "it has peft's adapters alone; give the checkpoint of their run, or merge them by peft: "
        "PeftModel.from_pretrained(model, FOLDER).merge_and_unload().save_pretrained(OUT), and give OUT"
    )


def find_family(shape: ModelShape) -> Family:
    """The family of a shape. Raises ConfigError if there is none."""
    if shape.family_at is not None:
        return _own(shape.family_at)
    if shape.family not in FAMILIES:
        raise ConfigError(f"model_type={shape.family!r} has no tables; allowed: {', '.join(FAMILIES)}")
    return FAMILIES[shape.family]


def layout_table(shape: ModelShape, layout: str) -> Sequence[ParamSpec]:
    """The rows of a layout. Raises like `find_family`, and ConfigError for a shape of another family's experts."""
    family = find_family(shape)
    found = family.stacked if shape.stacked_experts else family.tables
    if found is None:
        raise ConfigError(f"model_type={shape.family!r} has no tables for experts of one tensor a layer")
    return found[layout]


def _own(path: str) -> Family:
    family: Family = load_named(
        path, "learner.model (--family of tools)", "Family", lambda found: isinstance(found, Family)
    )
    return family


def hf_layout(shape: ModelShape, dims: ParallelDims | None = None) -> Layout:
    """The checkpoint on disk, or ``dims.dp`` full copies under its names."""
    return Layout(table=layout_table(shape, "hf"), shape=shape, dims=dims or ParallelDims())


def megatron_layout(
    shape: ModelShape, dims: ParallelDims | None = None, *, stages: tuple[int, ...] | None = None
) -> Layout:
    """The learner's ranks; ``stages`` as `Layout` has them.

    Raises ConfigError that names each size that a degree does not divide.
    """
    return Layout(table=layout_table(shape, "megatron"), shape=shape, dims=dims or ParallelDims(), stages=stages)
