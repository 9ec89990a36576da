"""The draft layer of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2) as a module of the last stage.

At a position it reads the decoder's output and the embedding of the next token. The output is taken after the final
norm, like in megatron-core and both engines. After one decoder layer and a norm it predicts the token after that one.
Embedding and output matrix are the policy's. Names are megatron-core's (``weights.layouts.tables.drafts``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection, RecomputeSection, RouterSection
from rl_megatron.learner.model.attention import DecoderConfig
from rl_megatron.learner.model.build import make_config, prepare_model_chunk
from rl_megatron.learner.model.latent import latent_attention_spec
from rl_megatron.learner.model.layers import RMSNorm, torch_layer_spec
from rl_megatron.learner.packed import PackedAttentionParams, local_tokens
from rl_megatron.models.shape import ModelShape

_PREFIX = "mtp.layers.0."


class DraftHead(MegatronModule):
    """The draft layer on ranks of the last pipeline stage, empty on others.

    Megatron reads from it, as from any chunk of a model, the embedding that first and last stages share.
    """

    pre_process = post_process = share_embeddings_and_output_weights = False

    def __init__(self, shape: ModelShape, learner: LearnerSection) -> None:
        shape = replace(shape, stacked_experts=shape.stacked_drafts)
        config = _config(shape, learner)
        super().__init__(config=config)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        layers = torch.nn.ModuleList([DraftLayer(shape, config)] if last else [])
        self.mtp = torch.nn.ModuleDict({"layers": layers})
        prepare_model_chunk(self, fused=False)

    @property
    def layer(self) -> DraftLayer | None:
        """The draft layer, on a rank that has it."""
        return next((module for module in self.modules() if isinstance(module, DraftLayer)), None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the state under megatron-core's keys, which count draft layers from 0."""
        if self.layer is None:
            return {}
        found: dict[str, Any] = self.layer.sharded_state_dict(prefix + _PREFIX, sharded_offsets, metadata)
        return found


class DraftLayer(MegatronModule):
    """Norms of both inputs, which a linear joins; a decoder layer like the model's last one; a norm."""

    def __init__(self, shape: ModelShape, config: DecoderConfig) -> None:
        super().__init__(config=config)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = (RMSNorm(config, size, eps) for _ in range(2))
        self.eh_proj = ColumnParallelLinear(
            2 * size, size, config=config, init_method=config.init_method, bias=False, gather_output=False
        )
        latent = latent_attention_spec(shape) if shape.latent else None
        spec = torch_layer_spec(shape, shape.num_layers - 1, latent)
        chunks = config.virtual_pipeline_model_parallel_size
        chunk = chunks - 1 if chunks else None
        number = shape.num_layers - get_transformer_layer_offset(config, vp_stage=chunk)
        self.transformer_layer = build_module(spec, config=config, layer_number=number, vp_stage=chunk)
        self.final_layernorm = RMSNorm(config, size, eps)

    def forward(self, hidden: Tensor, embedded: Tensor, attention: PackedAttentionParams) -> Tensor:
        """Maps ``hidden`` and ``embedded`` [t / tp, 1, h] to the output matrix's input [t / tp, 1, h]."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)
        mixed = gather_from_tensor_model_parallel_region(self.eh_proj(joined)[0])
        if self.config.sequence_parallel:
            mixed = scatter_to_sequence_parallel_region(mixed)
        out, _ = self.transformer_layer(mixed, attention_mask=None, packed_seq_params=attention)
        normed: Tensor = self.final_layernorm(out)
        return normed


def _config(shape: ModelShape, learner: LearnerSection) -> DecoderConfig:
    """Returns the policy's config with torch's layers and no recompute: one layer of one micro-batch fits in memory."""
    plain: dict[str, object] = {
        "layers": "torch",
        "recompute": RecomputeSection(),
        "router": RouterSection(),
        "batch_invariant": False,
    }
    config = make_config(shape, learner.model_copy(update=plain))
    config.moe_enable_routing_replay = False
    return config


@torch.no_grad()
def embedded(weight: Tensor, tokens: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Returns rows of the embedding [V / tp, h] for ``tokens`` [t] at this rank's positions: [t / tp, 1, h]. Every TP
    rank calls it."""
    group = parallel_state.get_tensor_model_parallel_group()
    local = tokens - len(weight) * group.rank()
    here = (local >= 0) & (local < len(weight))
    rows = F.embedding(local.where(here, 0), weight.detach()) * here[:, None]
    if group.size() > 1:
        dist.all_reduce(rows, group=group)
    own: Tensor = rows[local_tokens(len(rows))] if sequence_parallel else rows
    return own[:, None]
