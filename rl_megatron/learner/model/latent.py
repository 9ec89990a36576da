"""Multi-head latent attention over packed sequences (DeepSeek-V2, arXiv:2405.04434), under TransformerEngine's names.

Upstream: megatron-core ``transformer/multi_latent_attention.py``, whose rotary code needs CUDA. Keys and values, and
optionally queries, are projected up from low-rank latents; all heads share one key for the rotary part. With TP every
rank computes the latents of its share of the sequence with whole down projections, and its share of the heads for the
whole sequence.

The indexer of sparse attention (`shape.Indexer`) chooses keys for classes of longer sequences than its ``top_k``
(`learner.model.sparse`). Names are megatron-core's (``dsa.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_megatron.learner.model.attention import DecoderConfig, PackedAttention, parameter_device
from rl_megatron.learner.model.kernels import linear, rms_norm, rotate
from rl_megatron.learner.model.layers import NormColumnLinear
from rl_megatron.learner.model.sparse import choose_packed
from rl_megatron.learner.packed import PackedAttentionParams, local_tokens
from rl_megatron.models.indexer import index_keys, index_queries
from rl_megatron.models.rotary import as_halves, inverse_frequencies, softmax_scale
from rl_megatron.models.shape import LatentAttention, ModelShape


class _Tensors(torch.nn.Module):
    """Buffers by name."""

    def __init__(self, config: TransformerConfig, **sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=config.params_dtype, device=parameter_device(config)))


class FrozenIndexer(torch.nn.Module):
    """Projections of queries, of keys, and of a weight for each head, and the keys' norm, whole on every TP rank. No
    gradient reaches them."""

    def __init__(self, config: TransformerConfig, shape: ModelShape) -> None:
        super().__init__()
        assert shape.indexer is not None
        assert shape.latent is not None
        assert shape.latent.query_rank is not None
        self.sizes, self.sequence_parallel = shape.indexer, config.sequence_parallel
        heads, size = shape.indexer.heads, shape.indexer.head_dim
        self.linear_wq_b = _Tensors(config, weight=(heads * size, shape.latent.query_rank))
        self.linear_wk = _Tensors(config, weight=(size, shape.hidden_size))
        self.k_norm = _Tensors(config, weight=(size,), bias=(size,))
        self.linear_weights_proj = _Tensors(config, weight=(heads, shape.hidden_size))

    def restore_float32(self) -> None:
        """Restores float32 where published models have it."""
        self.k_norm.float()
        self.linear_weights_proj.float()

    @torch.no_grad()
    def forward(self, latent: Tensor, hidden: Tensor, packed: PackedAttentionParams, tp: ProcessGroup) -> Tensor:
        """Returns `choose_packed` of queries' latents [t / tp, R], after their norm, and of the attention's input
        [t / tp, h]. Every rank of ``tp`` calls it, and gets the same. ``packed`` has the rotary embedding."""
        assert packed.rotary is not None
        own = local_tokens(len(packed.positions)) if self.sequence_parallel else slice(None)
        cos, sin = (angle[own, 0] for angle in packed.rotary)
        wq_b, wk = self.linear_wq_b.get_buffer("weight"), self.linear_wk.get_buffer("weight")
        norm = self.k_norm.get_buffer("weight"), self.k_norm.get_buffer("bias")
        heads = self.linear_weights_proj.get_buffer("weight")
        query, weights = index_queries(self.sizes, latent, hidden, wq_b, heads, (cos, sin))
        key = index_keys(self.sizes, hidden, wk, *norm, (cos, sin))
        if self.sequence_parallel:
            parts = (query, weights, key)
            query, weights, key = (gather_from_sequence_parallel_region(x.contiguous(), group=tp) for x in parts)
        return choose_packed(query, weights, key, packed, self.sizes.top_k)


class ReplicatedLinear(torch.nn.Module):
    """``weight`` [out, in], replicated over TP: each rank uses it for its own tokens, and the gradients are summed."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig) -> None:
        super().__init__()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=parameter_device(config))
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return linear(x, self.weight)


class LatentUpLinear(NormColumnLinear):
    """RMS norm of a latent, then a column-parallel up projection."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[s, b, rank] -> ([s * tp, b, out / tp], None)."""
        out: tuple[Tensor, Tensor | None] = ColumnParallelLinear.forward(
            self, rms_norm(x, self.layer_norm_weight, LatentAttention.norm_eps), *args, **kwargs
        )
        return out


class LatentSelfAttention(MegatronModule):
    """Latent attention of one layer; needs ``shape.latent``."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        *,
        shape: ModelShape,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert shape.latent is not None
        self.sizes = m = shape.latent
        self.layer_number, self.tp = layer_number, pg_collection.tp
        heads, head = shape.num_heads, m.nope_dim + m.rope_dim
        self.heads = heads // self.tp.size()
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": self.tp,
        }
        cut = {**options, "gather_output": False}
        if m.query_rank is None:
            self.linear_q_proj = ColumnParallelLinear(shape.hidden_size, heads * head, **cut)
        else:
            self.linear_q_down_proj = ReplicatedLinear(shape.hidden_size, m.query_rank, config=config)
            self.linear_q_up_proj = LatentUpLinear(m.query_rank, heads * head, **cut)
        self.linear_kv_down_proj = ReplicatedLinear(shape.hidden_size, m.kv_rank + m.rope_dim, config=config)
        self.linear_kv_up_proj = LatentUpLinear(m.kv_rank, heads * (m.nope_dim + m.value_dim), **cut)
        self.core_attention = PackedAttention(
            config,
            layer_number=layer_number,
            softmax_scale=softmax_scale(head, shape.rope),
            pg_collection=pg_collection,
        )
        self.top_k, layer = None if shape.indexer is None else shape.indexer.top_k, layer_number - 1
        if shape.indexer is not None:
            self.source = max(one for one in shape.indexer.layers if one <= layer)  # the layer that chooses keys
            if self.source == layer:
                self.core_attention.indexer = FrozenIndexer(config, shape)
        self.linear_proj = RowParallelLinear(
            heads * m.value_dim, shape.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )
        self.frequencies = inverse_frequencies(shape.rope_theta, m.rope_dim, shape.rope, parameter_device(config))
        self.rotary_scale = shape.rope.attention_factor

    def forward(
        self, hidden: Tensor, *_: Any, packed_seq_params: PackedAttentionParams, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[t / tp, 1, h] -> ([t / tp, 1, h], None)."""
        packed = packed_seq_params
        if packed.rotary is None:
            angle = packed.positions[:, None].float() * self.frequencies
            packed.rotary = (angle.cos() * self.rotary_scale)[:, None], (angle.sin() * self.rotary_scale)[:, None]
        project, down = partial(self._project_up, packed), self._project_down(hidden)
        chosen = self._choose(hidden, down[0], packed)
        again = None
        if self.config.recompute_up_projections:
            again = CheckpointWithoutOutput(fp8=None)  # its default wants TransformerEngine
        query, key, value = again.checkpoint(project, *down) if again else project(*down)
        attended = self.core_attention.attend_laid_out(query, key, value, packed, chosen)
        if chosen is not None and attended.requires_grad:
            attended.register_hook(partial(self._forget, packed))
        if again:
            again.discard_output_and_register_recompute(attended)
        out: tuple[Tensor, Tensor | None] = self.linear_proj(attended[:, None])
        return out

    def _choose(self, hidden: Tensor, of_queries: Tensor, packed: PackedAttentionParams) -> Tensor | None:
        """Returns the keys that this layer attends to, as `PackedAttentionParams.chosen` says. None if no sequence is
        longer than ``top_k``: then each query attends to all keys up to its own."""
        longest = max(part.key_length for part in packed.classes)
        if self.top_k is None or longest <= self.top_k or self.core_attention.cp is not None:
            return None
        layer = self.layer_number - 1
        if layer not in packed.chosen and layer == self.source:
            norm = self.linear_q_up_proj.layer_norm_weight
            latent = rms_norm(of_queries.detach(), norm.detach(), LatentAttention.norm_eps)
            indexer = self.core_attention.get_submodule("indexer")
            packed.chosen[layer] = indexer(latent[:, 0], hidden[:, 0], packed, self.tp)
        return packed.chosen.get(layer if layer in packed.chosen else self.source)  # None: only padding is so long

    def _forget(self, packed: PackedAttentionParams, _: Tensor) -> None:
        """Frees this layer's entry once its backward pass begins: layers that share it have ended theirs."""
        packed.chosen.pop(self.layer_number - 1, None)

    def _project_down(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the latents of queries (or ``hidden`` itself) and of keys and values, and the shared key."""
        m = self.sizes
        of_queries = hidden if m.query_rank is None else self.linear_q_down_proj(hidden)
        latent, shared = self.linear_kv_down_proj(hidden).split([m.kv_rank, m.rope_dim], -1)
        return of_queries, latent, shared

    def _project_up(
        self, packed: PackedAttentionParams, of_queries: Tensor, latent: Tensor, shared: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, as attention takes them."""
        m = self.sizes
        query, _ = (self.linear_q_proj if m.query_rank is None else self.linear_q_up_proj)(of_queries)
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared.contiguous(), group=self.tp)
        up, _ = self.linear_kv_up_proj(latent)
        still, turning = query.view(-1, self.heads, m.nope_dim + m.rope_dim).split([m.nope_dim, m.rope_dim], -1)
        key, value = up.view(-1, self.heads, m.nope_dim + m.value_dim).split([m.nope_dim, m.value_dim], -1)
        assert packed.rotary is not None
        turned, shared = (rotate(as_halves(x), *packed.rotary) for x in (turning, shared))
        query = torch.cat([still, turned], -1)
        key = torch.cat([key, shared.expand(-1, self.heads, -1)], -1)
        return self.core_attention.lay_out(query, key, value, packed)


class UnnormalizedQueries(MLASelfAttention):
    """Megatron-core's, in which queries without a latent have no norm: 0.19 has one of its own in ``linear_q_proj``,
    which DeepSeek-V2-Lite lacks (NVIDIA-NeMo/Megatron-Bridge#5261). 0.16.1 asks for nothing of it."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        return {**super()._resolve_qk_norm_config(submodules), "linear_q_proj": submodules.linear_q_proj}


def megatron_latent_keywords(shape: ModelShape) -> dict[str, Any]:
    """Returns keywords for megatron's own latent attention (MLATransformerConfig), for a shape that it can compute."""
    m, rope = shape.latent, shape.rope
    assert m is not None
    stretched = rope.kind == "yarn"
    out = {
        "multi_latent_attention": True,  # DecoderConfig's fields stand before MLATransformerConfig's
        "q_lora_rank": m.query_rank,
        "kv_lora_rank": m.kv_rank,
        "qk_head_dim": m.nope_dim,
        "qk_pos_emb_head_dim": m.rope_dim,
        "v_head_dim": m.value_dim,
        "qk_layernorm": True,
        "rotary_base": shape.rope_theta,
        "rope_type": "yarn" if stretched else "rope",
        "mscale": rope.paired_mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    if stretched:
        out |= {
            "rotary_scaling_factor": rope.factor,
            "original_max_position_embeddings": rope.original_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
    return out


def latent_attention_spec(shape: ModelShape) -> ModuleSpec:
    """Self-attention of a layer of a ``shape`` with ``latent``. The layer's input norm is a module of its own."""
    return ModuleSpec(module=LatentSelfAttention, params={"shape": shape})
