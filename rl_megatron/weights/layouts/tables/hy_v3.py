"""Hunyuan 3: norms of heads; dense layers first, then experts whose router and shared expert have names of their own.

Source: transformers ``models/hy_v3``, and `drafts` for its draft layer.
"""

from __future__ import annotations

from rl_megatron.models.families.grouped_query import read_hy_v3
from rl_megatron.models.shape import ExpertNames
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp, experts
from rl_megatron.weights.layouts.tables.drafts import NUMBERED_WITH_FINAL_NORM, with_drafts

_NAMES = ExpertNames(router="router.gate.weight", selection_bias="expert_bias", shared="shared_mlp.")
HY_V3 = Family(
    model_types=("hy_v3",),
    read=read_hy_v3,
    tables=with_drafts(
        decoder(
            attention(qk_norm="head"), dense_mlp(), experts(names=_NAMES, bias=True, dense_first=True, shared=True)
        ),
        NUMBERED_WITH_FINAL_NORM,
    ),
    serves=True,
    names=_NAMES,
)
