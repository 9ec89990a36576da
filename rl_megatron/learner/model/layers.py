"""Pure-torch layers under TransformerEngine's parameter names, for machines without TransformerEngine (CPU or GPU).

One name table thus serves checkpoints and weight transfer everywhere. These layers support what megatron's local
layers refuse: RMSNorm with sequence parallelism, packed sequences, context parallelism, grouped experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_megatron.errors import ConfigError
from rl_megatron.learner.model.attention import AllHeadsAttention, DecoderConfig, PackedAttention, parameter_device
from rl_megatron.learner.model.experts import FusedExperts, StackedExperts
from rl_megatron.learner.model.kernels import expert_mlp, linear, rms_norm
from rl_megatron.models.shape import ModelShape
from rl_megatron.user_code import load_named


def norm_scale(config: TransformerConfig, weight: Tensor) -> Tensor:
    """Returns a norm's factor: its weight, or in float32 its weight plus 1 if the model's norms are zero-centered."""
    centered = isinstance(config, DecoderConfig) and config.shape.zero_centered
    return weight.float() + 1 if centered else weight


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension; marks its weight for megatron's sequence-parallel gradient all-reduce."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.config = eps, config
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config))
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return rms_norm(x, norm_scale(self.config, self.weight), self.eps)


class NormColumnLinear(ColumnParallelLinear):
    """RMS norm and column-parallel linear: ``layer_norm_weight`` and ``weight``, as TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        ones = torch.ones(input_size, dtype=config.params_dtype, device=parameter_device(config))
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> ([s, b, out / tp], None)."""
        normed = rms_norm(x, norm_scale(self.config, self.layer_norm_weight), self.config.layernorm_epsilon)
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
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=parameter_device(config)))
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            self.register_parameter(f"weight{expert}", weight)

    def forward(self) -> list[Tensor]:
        """Returns the weights, in order of experts. Megatron waits for weights on their way when a module is called."""
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
    """A GroupedColumnLinear that is sharded along the input: [out, in / etp]."""

    partition_dim = 1


class GroupedMLP(TEGroupedMLP):
    """Megatron's grouped experts in torch: its modules, names and sharding, with linears and SwiGLU in one pass.

    The token dispatcher communicates over ETP.
    """

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [n, h] sorted by expert -> ([n, h], None), scaled by ``probs`` [n]."""
        weights = self.linear_fc1(), self.linear_fc2()
        return expert_mlp(x, probs, tokens_per_expert.tolist(), *weights, recompute=self.activation_recompute), None


class LocalDispatcher(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher of a group of one: rows are sorted by expert already, so it does not sort again."""

    tokens_per_expert: Tensor | None

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows [n, h] and ``probs`` [n] unchanged, and between them the number of rows of each expert."""
        counts: Tensor = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        counts = self._maybe_dtoh_and_synchronize("before_finish", counts)
        self.tokens_per_expert = None
        return hidden, counts, probs

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        """Returns the rows unchanged."""
        return hidden


def specialize(model: torch.nn.Module) -> None:
    """Replaces linears and dispatchers whose group has one rank by faster ones without communication."""
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
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    **others: Any,
) -> Tensor:
    if not (allreduce_dgrad or sequence_parallel):
        out = linear(input, weight)
        return out if bias is None else out + bias
    flags = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel}
    return upstream(input=input, weight=weight, bias=bias, **flags, **others)


class SharedExperts(SharedExpertMLP):
    """Megatron's shared experts, with the gate, which it makes on the CPU, moved to the model's device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.gate_weight is not None:
            self.gate_weight.data = self.gate_weight.data.to(parameter_device(self.config))


def torch_layer_spec(
    shape: ModelShape, layer: int, latent: ModuleSpec | None = None, delta: ModuleSpec | None = None
) -> ModuleSpec:
    """Returns decoder layer ``layer`` of the layers above, with state-dict names of megatron's TransformerEngine spec.

    ``latent`` attention, if given, replaces grouped-query attention and follows an input norm of its own, and ``delta``
    replaces either in ``shape.delta_layers``.
    """
    if layer not in shape.delta_layers:
        delta = None
    sparse = layer in shape.moe_layers
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm if latent and not delta else IdentityOp,
            self_attention=delta
            or latent
            or ModuleSpec(
                module=AllHeadsAttention if shape.qk_norm == "all" else SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=_attention(shape),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if sparse else IdentityOp,
            mlp=_experts(shape) if sparse else ModuleSpec(module=MLP, submodules=_DENSE),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def own_layer_spec(path: str, shape: ModelShape, layer: int) -> ModuleSpec:
    """Returns decoder layer ``layer`` from the user's function at ``path``, ``package.module:name``.

    Raises ConfigError if ``path`` cannot be imported, is not a function or does not return a ModuleSpec.
    """
    spec = load_named(path, "learner.layers", "function", callable)(shape, layer)
    if not isinstance(spec, ModuleSpec):
        raise ConfigError(
            f"learner.layers={path!r} returned {spec!r:.80} for layer {layer}; it must return a ModuleSpec of "
            "megatron-core, as rl_megatron.learner.model.layers.torch_layer_spec does"
        )
    return spec


_DENSE = MLPSubmodules(linear_fc1=NormColumnLinear, linear_fc2=RowParallelLinear)
_SHARED = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
_GROUPED = MLPSubmodules(linear_fc1=GroupedColumnLinear, linear_fc2=GroupedRowLinear)


def _attention(shape: ModelShape) -> SelfAttentionSubmodules:
    norm = RMSNorm if shape.qk_norm == "head" else None  # AllHeadsAttention makes those over all heads
    return SelfAttentionSubmodules(
        linear_qkv=NormColumnLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )


def _experts(shape: ModelShape) -> ModuleSpec:
    shared = ModuleSpec(module=SharedExperts, submodules=_SHARED) if shape.shared_width else None
    together = FusedExperts if shape.expert_bias else StackedExperts
    apart = ModuleSpec(module=GroupedMLP, submodules=_GROUPED)
    experts = together if shape.expert_bias or shape.stacked_experts else apart
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))
