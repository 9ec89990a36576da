"""Pure-torch layers under TransformerEngine's parameter names, for machines without TransformerEngine (CPU or GPU).

One name table then serves checkpoints and weight transfer everywhere. They differ from megatron's local layers where
those refuse something we need: RMSNorm with sequence parallelism, packed sequences, context parallelism, grouped
experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_megatron.learner.fused import expert_mlp, from_slots, into_slots, linear, rms_norm, rotate
from rl_megatron.learner.packed import LengthClass, PackedAttentionParams


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's configuration and the rotary base, which megatron keeps outside of it."""

    rotary_base: float = 10000.0


def _device(config: TransformerConfig) -> torch.device:
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension whose weight is marked for megatron's sequence-parallel gradient sum."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return rms_norm(x, self.weight, self.eps)


class NormColumnLinear(ColumnParallelLinear):
    """RMS norm and column-parallel linear: ``layer_norm_weight`` and ``weight``, as TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        ones = torch.ones(input_size, dtype=config.params_dtype, device=_device(config))
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> ([s, b, out / tp], None)."""
        normed = rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        out: tuple[Tensor, Tensor | None] = super().forward(normed, *args, **kwargs)
        return out


class GroupedColumnLinear(torch.nn.Module):
    """Experts' linears ``weight0..weight{n-1}`` [out / etp, in], as TEColumnParallelGroupedLinear names them."""

    partition_dim = 0

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=_device(config)))
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{expert}", weight)

    @property
    def weights(self) -> list[Tensor]:
        """In the order of the experts."""
        return [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Experts as slices of one global [num_experts, ...] tensor (upstream: TEGroupedLinear._sharded_state_dict)."""
        assert metadata is not None
        total = self.groups.ep.size() * self.num_gemms
        offset = self.groups.ep.rank() * self.num_gemms
        out = {}
        for expert in range(self.num_gemms):
            shard = make_sharded_tensors_for_checkpoint(
                {f"{expert}.weight": getattr(self, f"weight{expert}")},
                "",
                {f"{expert}.weight": self.partition_dim},
                (*sharded_offsets, (len(sharded_offsets), offset + expert, total)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shard, f"{expert}.", prefix)
            tensor = shard[f"{expert}.weight"]
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            out[f"{prefix}weight{expert}"] = tensor
        return out


class GroupedRowLinear(GroupedColumnLinear):
    """As GroupedColumnLinear, cut along the input: [out, in / etp]."""

    partition_dim = 1


class GroupedMLP(TEGroupedMLP):
    """Megatron's grouped experts over torch: its modules, names and sharding, with the linears and SwiGLU in one pass.

    The dispatcher does the ETP communication.
    """

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens sorted by expert, [n, h] -> ([n, h], None), times ``probs`` [n]."""
        return expert_mlp(x, probs, tokens_per_expert.tolist(), self.linear_fc1.weights, self.linear_fc2.weights), None


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention of packed sequences over torch SDPA; GQA, TP (heads come cut), CP.

    Sequences of like length are attended in one padded call (see packed.py), so cost does not grow with their number.
    Under CP each rank gathers keys and values (backward: reduce-scatter) and attends its own zig-zag chunks.
    """

    def __init__(
        self, config: DecoderConfig, *_: Any, softmax_scale: float | None = None, pg_collection: Any, **__: Any
    ) -> None:
        super().__init__(config=config)
        self.cp = pg_collection.cp if config.context_parallel_size > 1 else None
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        even = torch.arange(0, config.kv_channels, 2, dtype=torch.float32, device=_device(config))
        self.inverse_frequency = config.rotary_base ** -(even / config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedAttentionParams, **__: Any
    ) -> Tensor:
        """query [t, h, d], key and value [t, g, d] -> [t, h * d]."""
        packed = packed_seq_params
        if packed.rotary is None:
            angle = packed.positions[:, None].float() * self.inverse_frequency
            packed.rotary = angle.cos()[:, None], angle.sin()[:, None]
        query, key = rotate(query, *packed.rotary), rotate(key, *packed.rotary)
        if self.cp is not None:
            joined = torch.cat([key, value], -1).contiguous()
            key, value = gather_from_sequence_parallel_region(joined, group=self.cp).split(key.shape[-1], -1)
        if packed.queries is not None:
            query = into_slots(query, packed.queries)
        if packed.keys is not None:
            key, value = into_slots(key, packed.keys), into_slots(value, packed.keys)
        output = self._attend(query, key, value, packed.classes)
        return output if packed.queries is None else from_slots(output, packed.queries)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, classes: Sequence[LengthClass]) -> Tensor:
        """Slots of all classes, one call each -> [slots, h * d]."""
        queries = _split(query, [c.count * c.query_length for c in classes])
        keys, values = (_split(x, [c.count * c.key_length for c in classes]) for x in (key, value))
        outputs = []
        for part, *qkv in zip(classes, queries, keys, values, strict=True):
            q, k, v = (x.unflatten(0, (part.count, -1)).transpose(1, 2) for x in qkv)
            causal, grouped = part.mask is None, query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=part.mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return x.split(sizes) if len(sizes) > 1 else [x]  # one part is no copy in the backward


class LocalDispatcher(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher of a group of one: what is sorted by expert before the exchange is so after it."""

    tokens_per_expert: Tensor | None

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [n, h] and ``probs`` [n] as they are, and each expert's number of rows between them."""
        counts: Tensor = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        counts = self._maybe_dtoh_and_synchronize("before_finish", counts)
        self.tokens_per_expert = None
        return hidden, counts, probs

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        """As they are."""
        return hidden


def specialise(model: torch.nn.Module) -> None:
    """Take what is general out of a built model's inner loops: linears and dispatchers without a group."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = partial(_multiply, module._forward_impl)
        if isinstance(module, MoELayer) and module.token_dispatcher.ep_size * module.token_dispatcher.tp_size == 1:
            experts = module.num_local_experts, module.local_expert_indices
            module.token_dispatcher = LocalDispatcher(
                *experts, config=module.config, pg_collection=get_default_pg_collection()
            )


def _multiply(
    upstream: Callable[..., Tensor],
    *,
    input: Tensor,
    weight: Tensor,
    bias: None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    **others: Any,
) -> Tensor:
    assert bias is None
    if not (allreduce_dgrad or sequence_parallel):
        return linear(input, weight)
    flags = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel}
    return upstream(input=input, weight=weight, bias=bias, **flags, **others)


def torch_layer_spec() -> ModuleSpec:
    """One MoE decoder layer of the layers above, with the state-dict names of megatron's TransformerEngine spec."""
    attention = SelfAttentionSubmodules(
        linear_qkv=NormColumnLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        k_layernorm=RMSNorm,
    )
    experts = ModuleSpec(
        module=GroupedMLP, submodules=MLPSubmodules(linear_fc1=GroupedColumnLinear, linear_fc2=GroupedRowLinear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
