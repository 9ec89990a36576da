"""MiniMax-M2: norms over all heads of q or k at once, Mixtral's names of experts, a selection bias beside the router.

Source: transformers ``models/minimax_m2``. There is no table for engines: their ranks hold norms of repeated heads.
"""

from __future__ import annotations

from rl_megatron.models.families.grouped_query import read_minimax_m2
from rl_megatron.models.shape import ExpertNames
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

_NAMES = ExpertNames(prefix="block_sparse_moe.", parts=("w1", "w3", "w2"), selection_bias="e_score_correction_bias")
MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    read=read_minimax_m2,
    tables=decoder(attention(qk_norm="all"), experts(names=_NAMES, bias=True), planned=False),
    serves=True,
    names=_NAMES,
)
