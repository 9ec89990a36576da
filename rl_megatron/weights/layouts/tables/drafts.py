"""Draft layers, for multi-token prediction (DeepSeek-V3, arXiv:2412.19437): rows of the last layer, and four more.

In published files each has copies of the model's embedding and output matrix, too. They have no rows: whoever reads
such a folder takes the model's own. Sources: the published index of DeepSeek-V3 and GLM-4.5; megatron-core 0.16
``transformer/multi_token_prediction.py`` (``eh_proj`` is cut by rows; its input is the embedding's norm, then the
hidden state's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import ParamSpec
from rl_megatron.weights.layouts.tables.blocks import dense_layers
from rl_megatron.weights.layouts.tables.rows import DECODER, LAYER, hidden, matrix, vector, whole

DRAFT = "mtp.layers.{layer}."
"""Megatron's name of a draft layer, but that its number follows those of the decoder's layers."""
JOIN = "eh_proj.weight"
"""What every draft layer has, and no other."""
_FINAL = LAYER + "shared_head.norm.weight"


def with_drafts(tables: Mapping[str, Sequence[ParamSpec]]) -> dict[str, tuple[ParamSpec, ...]]:
    """The tables of a family whose files may hold draft layers, with rows for shapes that have them; it has experts."""
    return {
        layout: (*rows, *(_drafted(row) for row in rows if _in_last(row)), *_own(layout == "megatron"))
        for layout, rows in tables.items()
    }


def has_draft_rows(table: Sequence[ParamSpec]) -> bool:
    """Whether a family's table has rows of draft layers."""
    return any(row.name.endswith(JOIN) for row in table)


def _in_last(row: ParamSpec) -> bool:
    """Whether the last layer of the decoder, which has experts, has the row."""
    return "{layer}" in row.name and row.layers is not dense_layers


def _drafted(row: ParamSpec) -> ParamSpec:
    """The row of the decoder's layers as one of draft layers."""
    return replace(
        row,
        name=row.name.replace(DECODER, DRAFT + "transformer_layer."),
        layers=_layers,
        exists=lambda m, dims: m.drafts and row.exists(m, dims),
    )


def _own(megatron: bool) -> tuple[ParamSpec, ...]:
    """What a draft layer has beside a decoder layer's parts."""
    prefix, final = (DRAFT, DRAFT + "final_layernorm.weight") if megatron else (LAYER, _FINAL)
    rows = (
        vector(prefix + "enorm.weight", LAYER + "enorm.weight", hidden),
        vector(prefix + "hnorm.weight", LAYER + "hnorm.weight", hidden),
        matrix(prefix + JOIN, whole(LAYER + JOIN, hidden), columns=_both, axis="tp" if megatron else None),
        vector(final, _FINAL, hidden),
    )
    return tuple(replace(row, layers=_layers, exists=_exist) for row in rows)


def _both(m: ModelShape) -> int:
    return 2 * m.hidden_size


def _layers(m: ModelShape) -> range:
    return m.drafted


def _exist(m: ModelShape, _dims: ParallelDims) -> bool:
    return m.drafts
