"""Draft layers, for multi-token prediction (DeepSeek-V3, arXiv:2412.19437): rows of the last layer, and four more.

In published files some have copies of the model's embedding and output matrix, too. They have no rows: readers of
such a folder take the model's own. Sources: the published index of DeepSeek-V3, GLM-4.5 and Qwen3-Next; vLLM 0.32.0
``models/hy_v3_mtp.py`` and SGLang 0.5.21 ``models/hunyuan_v3_nextn.py``; megatron-core 0.16
``transformer/multi_token_prediction.py`` (``eh_proj`` is cut by rows; its input is the embedding's norm, then the
hidden state's, as that of ``mtp.fc`` in vLLM 0.32.0 ``models/qwen3_next_mtp.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.layout import ParamSpec
from rl_megatron.weights.layouts.tables.blocks import dense_layers
from rl_megatron.weights.layouts.tables.rows import DECODER, LAYER, OfLayers, hidden, matrix, under, vector, whole

DRAFT = "mtp.layers.{layer}."
"""Megatron's name of a draft layer, but that its number follows those of the decoder's layers."""
_JOIN = "eh_proj.weight"
_layers: OfLayers = attrgetter("drafted")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNames:
    """Hugging Face's names of a draft layer: the ``prefix`` of its decoder layer, and whole names of its own parts."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str


NUMBERED = DraftNames(
    prefix=LAYER,
    embedding_norm=LAYER + "enorm.weight",
    hidden_norm=LAYER + "hnorm.weight",
    join=LAYER + _JOIN,
    final_norm=LAYER + "shared_head.norm.weight",
)
"""Draft layers of DeepSeek and GLM, numbered after those of the decoder."""
NUMBERED_WITH_FINAL_NORM = replace(NUMBERED, final_norm=LAYER + "final_layernorm.weight")
"""Draft layers of Hunyuan 3, numbered in the same way."""
ALONE = DraftNames(
    prefix="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    join="mtp.fc.weight",
    final_norm="mtp.norm.weight",
)
"""The draft layer of Qwen."""


def with_drafts(
    tables: Mapping[str, Sequence[ParamSpec]],
    names: DraftNames = NUMBERED,
    *,
    without: Sequence[Callable[[ModelShape], Sequence[int]]] = (),
    separate: Mapping[str, Sequence[ParamSpec]] | None = None,
) -> dict[str, tuple[ParamSpec, ...]]:
    """The tables of a family whose files may hold draft layers, with rows for shapes that have them; it has experts.

    A draft layer has no rows of the layers ``without``. ``separate`` are the same family's tables with experts one
    by one, where those of ``tables`` are one tensor a layer. A draft layer then has either, whatever the decoder has.
    """
    out = {}
    for layout, rows in tables.items():
        drafted = _drafted(rows, names, without)
        if separate is not None:
            drafted = _either(drafted, _drafted(separate[layout], names, without))
        out[layout] = (*rows, *drafted, *_own(names, megatron=layout == "megatron"))
    return out


def has_draft_rows(table: Sequence[ParamSpec]) -> bool:
    """True if a family's table has rows of draft layers."""
    return holds_draft(row.name for row in table)


def holds_draft(names: Iterable[str]) -> bool:
    """True if one of the names, of any layout, is a draft layer's."""
    return any(name.endswith((_JOIN, ALONE.join)) for name in names)


def _drafted(
    rows: Sequence[ParamSpec], names: DraftNames, without: Sequence[Callable[[ModelShape], Sequence[int]]]
) -> list[ParamSpec]:
    """The rows of the decoder's last layer, which has experts and attends, as those of draft layers."""
    last = [row for row in rows if "{layer}" in row.name and row.layers not in (dense_layers, *without)]
    return [_moved(under(names.prefix, row, named_so=True, instead=LAYER)) for row in last]


def _moved(row: ParamSpec) -> ParamSpec:
    name = row.name.replace(DECODER, DRAFT + "transformer_layer.")
    return replace(
        row,
        name=name,
        layers=_layers,
        is_first_only="{layer}" not in name,
        condition=lambda m, dims: m.num_draft_layers and row.condition(m, dims),
    )


def _either(stacked: Sequence[ParamSpec], separate: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Rows of both kinds; those that one kind alone has are for shapes of that kind."""
    in_stacked, in_apart = ({row.name for row in rows} for rows in (stacked, separate))
    return [
        *(row if row.name in in_apart else _where(row, stacked=True) for row in stacked),
        *(_where(row, stacked=False) for row in separate if row.name not in in_stacked),
    ]


def _where(row: ParamSpec, *, stacked: bool) -> ParamSpec:
    return replace(row, condition=lambda m, dims: row.condition(m, dims) and m.stacked_drafts == stacked)


def _own(names: DraftNames, *, megatron: bool) -> tuple[ParamSpec, ...]:
    """Returns the rows of a draft layer that a decoder layer lacks."""
    called = {
        names.embedding_norm: DRAFT + "enorm.weight",
        names.hidden_norm: DRAFT + "hnorm.weight",
        names.join: DRAFT + _JOIN,
        names.final_norm: DRAFT + "final_layernorm.weight",
    }
    first, second, join, final = called.values() if megatron else called
    rows = (
        vector(first, names.embedding_norm, hidden),
        vector(second, names.hidden_norm, hidden),
        matrix(join, whole(names.join, hidden), columns=lambda m: 2 * m.hidden_size, axis="tp" if megatron else None),
        vector(final, names.final_norm, hidden),
    )
    return tuple(
        replace(row, layers=_layers, is_first_only="{layer}" not in row.name, condition=lambda m, _: m.num_draft_layers)
        for row in rows
    )
