"""OLMoE: Qwen3-MoE's names, and norms over all heads of q or k at once.

Source: transformers ``models/olmoe``. There is no table for engines: their ranks hold parts of these norms.
"""

from __future__ import annotations

from rl_megatron.models.families import olmoe
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

OLMOE = Family(
    model_types=("olmoe",),
    read=olmoe.read,
    tables=decoder(attention(qk_norm="all"), experts(), planned=False),
    serves=True,
)
