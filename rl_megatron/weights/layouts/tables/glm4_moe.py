"""GLM-4.5 and 4.6: dense layers first, then shared and routed experts; the first has q/k norms, the Air models do not.

Source: transformers ``models/glm4_moe``.
"""

from __future__ import annotations

from rl_megatron.models.families.grouped_query import read_glm4_moe
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp, experts
from rl_megatron.weights.layouts.tables.drafts import with_drafts

GLM4_MOE = Family(
    model_types=("glm4_moe",),
    read=read_glm4_moe,
    tables=with_drafts(
        decoder(
            attention(qkv_bias=True, qk_norm="head"),
            dense_mlp(),
            experts(bias=True, dense_first=True, shared=True),
        )
    ),
    serves=True,
)
