"""Builds this rank's megatron GPTModel chunks from a ModelShape, with TransformerEngine's layers if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from rl_megatron.config.activations import uses_transformer_engine
from rl_megatron.config.learner_checks import refuse
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.feature import Attention, Dtype
from rl_megatron.learner.keywords import keywords
from rl_megatron.learner.model.attention import DecoderConfig, LatentDecoderConfig
from rl_megatron.learner.model.delta import delta_net_spec
from rl_megatron.learner.model.latent import (
    FrozenIndexer,
    UnnormalizedQueries,
    latent_attention_spec,
    megatron_latent_keywords,
)
from rl_megatron.learner.model.layers import RMSNorm, own_layer_spec, specialize, torch_layer_spec
from rl_megatron.models.rotary import inverse_frequencies
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.layout import padded_vocab


def with_dtypes(given: Mapping[str, object]) -> dict[str, Any]:
    """Options' keywords with torch's dtypes and megatron-core's attention in place of their names."""
    named = {Attention: AttnBackend.__getitem__, Dtype: torch_dtype}
    return {
        name: named[type(one)](one.name) if isinstance(one, Attention | Dtype) else one for name, one in given.items()
    }


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype called ``name``."""
    found: torch.dtype = getattr(torch, name)
    return found


def make_config(shape: ModelShape, learner: LearnerSection) -> DecoderConfig:
    """Megatron's configuration for one rank, from the model's shape and the options' keywords.

    Raises ConfigError as `refuse`, and if the machine lacks what an option needs.
    """
    fused = uses_transformer_engine(learner, shape)
    refuse(shape, learner)
    of_model = _attention_keywords(shape, fused) | (_expert_keywords(shape) if shape.num_experts else {})
    kind = LatentDecoderConfig if fused and shape.latent else DecoderConfig
    made = kind(
        shape=shape,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        ffn_hidden_size=shape.dense_width or shape.expert_width,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=shape.out_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # weights always come from a checkpoint
        calculate_per_token_loss=True,
        **of_model,
        **with_dtypes(keywords(learner, shape).model),
    )
    if made.fp8:
        _check_generation(learner, made)
    return made


def _check_generation(learner: LearnerSection, config: DecoderConfig) -> None:
    """Raises ConfigError if this rank's GPU or CUDA has no kernels for ``learner.fp8``."""
    from megatron.core.fp8_utils import get_fp8_recipe
    from transformer_engine.pytorch.quantization import check_recipe_support

    try:
        check_recipe_support(get_fp8_recipe(config))
    except AssertionError as error:
        raise ConfigError(f"learner.fp8={learner.fp8}: {error} Set another recipe, or leave it out") from error


def _attention_keywords(shape: ModelShape, fused: bool) -> dict[str, Any]:
    if fused and shape.latent:
        return megatron_latent_keywords(shape)
    more: dict[str, Any] = {"attention_output_gate": True} if shape.output_gate else {}
    if shape.delta_layers:  # makes megatron name layers one by one in checkpoints
        more["linear_attention_freq"] = [int(layer in shape.delta_layers) for layer in range(shape.num_layers)]
    return {
        **more,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "qk_layernorm": shape.qk_norm == "head",  # megatron sums those norms' gradients over tp, by their names
        "add_qkv_bias": shape.qkv_bias,
    }


def _expert_keywords(shape: ModelShape) -> dict[str, Any]:
    router = shape.router
    alone = shape.num_experts == 1  # its weight is 1 either way, and megatron takes one expert a token only with this
    out: dict[str, Any] = {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.expert_width,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": router.score == "softmax" and (alone or not shape.normalize_top_k),
        "moe_router_score_function": router.score,
        "moe_grouped_gemm": True,
        "moe_enable_routing_replay": True,  # costs nothing while no routes are replayed (`features.replay`)
    }
    if shape.dense_layers:  # makes megatron name layers one by one in checkpoints
        out["moe_layer_freq"] = [int(layer in shape.moe_layers) for layer in range(shape.num_layers)]
    if shape.shared_width:
        out["moe_shared_expert_intermediate_size"] = shape.shared_width
    if shape.shared_gate:
        out["moe_shared_expert_gate"] = True
    if router.selection_bias:
        out["moe_router_enable_expert_bias"] = True
    if router.scaling != 1:
        out["moe_router_topk_scaling_factor"] = router.scaling
    if router.top_groups < router.groups:
        out |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.top_groups}
    return out


def build_chunks(shape: ModelShape, learner: LearnerSection, config: DecoderConfig) -> list[GPTModel]:
    """Returns this rank's model chunks (one, or vpp of them). Every rank calls it, after the process groups exist."""
    d = learner.dims
    if config.batch_invariant_mode:
        from megatron.core.transformer.custom_layers import batch_invariant_kernels  # needs Triton

        batch_invariant_kernels.enable_batch_invariant_mode()  # affects all models of this process
    return [_build_chunk(shape, learner, config, stage if d.vpp > 1 else None) for stage in range(d.vpp)]


def _build_chunk(shape: ModelShape, learner: LearnerSection, config: DecoderConfig, vp_stage: int | None) -> GPTModel:
    fused = uses_transformer_engine(learner, shape)
    virtual: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage} if vp_stage is not None else {}
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(shape, learner, config, fused, vp_stage),
        vocab_size=padded_vocab(shape, learner.tp),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope" if fused else "none",  # our torch attention rotates by itself
        rotary_base=shape.rope_theta,
        rotary_percent=shape.rotary_dim / shape.head_dim,
        vp_stage=vp_stage,
    )
    if fused and shape.latent is None:  # latent attention has its own
        model.rotary_pos_emb.inv_freq = inverse_frequencies(
            shape.rope_theta, shape.rotary_dim, shape.rope, model.rotary_pos_emb.inv_freq.device
        )
    prepare_model_chunk(model, fused=fused)
    return model


def prepare_model_chunk(model: torch.nn.Module, *, fused: bool) -> None:
    """Marks parameters as megatron's optimizer tells them apart, and makes layers fast, unless they are ``fused`` ones
    of TransformerEngine."""
    _mark_tensor_parallel(model)
    _mark_experts(model)
    if not fused:
        specialize(model)
    forget_routes(model)


def freeze_routers(layers: Iterable[Any]) -> None:
    """Keeps all parameters of their routers out of gradients and optimizer. Call it before DistributedDataParallel."""
    for layer in layers:
        if layer.is_moe_layer:
            layer.mlp.router.requires_grad_(False)


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Marks the weights that TP shards. Megatron marks them while it initializes weights, which we skip; without the
    marks the gradient norm counts only rank 0's shards of them."""
    cut = ((ColumnParallelLinear, 0), (RowParallelLinear, 1), (VocabParallelEmbedding, 0))
    for module in model.modules():
        for kind, dim in cut:
            if isinstance(module, kind) and module.weight is not None and not hasattr(module.weight, "partition_dim"):
                set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def _mark_experts(model: torch.nn.Module) -> None:
    """Marks experts' weights as reduced over the ranks that hold the same experts, and so optimized separately.

    Megatron does so only where EP exceeds 1. Done at every degree, checkpoints have one form, whatever EP and ETP are.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False


def _block_spec(
    shape: ModelShape, learner: LearnerSection, config: DecoderConfig, fused: bool, vp_stage: int | None
) -> Any:
    if fused:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if shape.latent and shape.latent.query_rank is None:
            for layer_spec in block.layer_specs:
                layer_spec.submodules.self_attention.module = UnnormalizedQueries
        return block
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    if learner.own_layers is not None:
        specs = [own_layer_spec(learner.own_layers, shape, layer) for layer in layers]
    else:
        latent = latent_attention_spec(shape) if shape.latent else None
        delta = delta_net_spec(shape) if shape.delta else None
        specs = [torch_layer_spec(shape, layer, latent, delta) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def restore_float32_buffers(chunks: Sequence[torch.nn.Module]) -> None:
    """Restores float32 in buffers that keep it, which half precision converts. Call it before they are filled."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module._maintain_float32_expert_bias()
            if isinstance(module, FrozenIndexer):
                module.restore_float32()


_ROUTES = {"routing_map", "probs", "token_probs"}
"""Attributes of megatron-core's dispatchers, and of what these send by: tensors of tokens x experts."""


def forget_routes(model: torch.nn.Module) -> None:
    """Makes the dispatchers of ``model`` forget the routes of a pass once their layer's output is combined.

    Megatron-core's dispatchers keep probabilities and maps, of tokens x experts, as attributes until the next pass.
    Where a layer is computed again in the backward pass, the probabilities hold its graph, and by it the layer's input
    and the gradient of that. After the backward pass that is twice the hidden states of every layer with experts. In
    its first pass, without a graph, they are still a float32 number for each token and expert of every layer.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            dispatcher.combine_postprocess = partial(_combine, dispatcher, dispatcher.combine_postprocess)


def _combine(dispatcher: Any, upstream: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    out = upstream(hidden)
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in vars(holder).items() if holder is not None else ():
            if name in _ROUTES or (isinstance(value, Tensor) and value.requires_grad):
                setattr(holder, name, None)
    return out
