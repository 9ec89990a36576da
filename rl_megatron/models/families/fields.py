"""The keys of ``config.json`` that are read, with their types and the sizes that a model can have.

A key is checked when a reader asks for it, so keys that only other families read may have any value. A key that is null
or not there is as transformers' default for its family, which the family's reader has, or an error. Draft layers are
those of the key alone, for transformers' default is 1 also where a file has no weights of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rl_megatron.models.json_files import Fields, JsonFields, read_json

_Count = Annotated[int, Field(ge=1, le=100_000)] | None  # number of layers, heads or experts: things that have names
_Some = Annotated[int, Field(ge=0, le=100_000)] | None
_Length = Annotated[int, Field(ge=0, le=1 << 31)] | None
_Width = Annotated[int, Field(ge=1, le=1 << 31)] | None
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
_Share = Annotated[float, Field(gt=0, le=1)] | None
_Edge = Annotated[int, Field(ge=1, le=1 << 31)]
_Flag = bool | None
_Text = str | None


class RopeFields(JsonFields):
    """``rope_parameters``, or ``rope_scaling`` of older files."""

    rope_type: _Text = None
    type: _Text = None
    rope_theta: _Number = None
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    original_max_position_embeddings: Annotated[float, Field(ge=1, le=1 << 31)] | None = None
    low_freq_factor: _Number = None
    high_freq_factor: _Number = None
    beta_fast: _Number = None
    beta_slow: _Number = None
    truncate: _Flag = None
    mscale: _Number = None
    mscale_all_dim: _Number = None
    attention_factor: _Number = None
    partial_rotary_factor: _Share = None


class NumberFields(JsonFields):
    """``weights`` of a group of modules, in a ``quantization_config`` of compressed-tensors."""

    type: _Text = None
    num_bits: _Count = None
    strategy: _Text = None
    group_size: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    block_structure: list[_Edge] | str | None = None
    symmetric: _Flag = None
    actorder: bool | str | None = None


class GroupFields(JsonFields):
    """A group of modules, in a ``quantization_config`` of compressed-tensors."""

    format: _Text = None
    weights: NumberFields | None = None


class QuantizationFields(JsonFields):
    """``quantization_config``."""

    quant_method: _Text = None
    fmt: _Text = None
    weight_block_size: list[_Edge] | None = None
    format: _Text = None
    config_groups: dict[str, GroupFields] | None = None
    transform_config: dict[str, Any] | None = None


CLASSIFIER = "ForSequenceClassification"
"""Ends the architecture of a model that scores a text."""


class ConfigFields(JsonFields):
    """config.json: the keys of every family; a reader asks for its own."""

    model_type: _Text = None
    architectures: list[str] | None = None
    dtype: _Text = None
    torch_dtype: _Text = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    hidden_size: _Width = None
    num_attention_heads: _Count = None
    num_key_value_heads: _Count = None
    head_dim: _Width = None
    vocab_size: _Width = None
    max_position_embeddings: _Width = None
    intermediate_size: _Width = None
    moe_intermediate_size: _Width = None
    shared_expert_intermediate_size: _Width = None
    linear_num_key_heads: _Count = None
    linear_num_value_heads: _Count = None
    linear_key_head_dim: _Width = None
    linear_value_head_dim: _Width = None
    linear_conv_kernel_dim: _Count = None
    full_attention_interval: _Count = None
    num_experts: _Count = None
    num_local_experts: _Count = None
    n_routed_experts: _Count = None
    num_experts_per_tok: _Count = None
    n_shared_experts: _Count = None  # 0: transformers has MLPs of no width, or of the dense width in Hunyuan 3
    num_shared_experts: _Count = None
    expert_hidden_dim: _Width = None
    first_k_dense_replace: _Some = None
    n_group: _Count = None
    topk_group: _Count = None
    num_nextn_predict_layers: _Some = None
    num_mtp_modules: _Some = None
    mtp_num_hidden_layers: _Some = None
    q_lora_rank: _Width = None
    kv_lora_rank: _Width = None
    qk_nope_head_dim: _Width = None
    qk_rope_head_dim: _Width = None
    v_head_dim: _Width = None
    index_n_heads: _Count = None
    index_head_dim: _Width = None
    index_topk: _Width = None
    index_topk_freq: _Some = None
    index_skip_topk_offset: _Some = None
    index_topk_pattern: list[str] | str | None = None
    indexer_types: list[str] | None = None
    indexer_rope_interleave: _Flag = None
    rotary_dim: _Width = None
    sliding_window: _Length = None
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    rms_norm_eps: _Number = None
    rope_theta: _Number = None
    rope_parameters: dict[str, Any] | None = None  # has the keys of `RopeFields`
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: _Share = None
    routed_scaling_factor: _Number = None
    router_scaling_factor: _Number = None
    swiglu_limit: _Number = None
    norm_topk_prob: _Flag = None
    tie_word_embeddings: _Flag = None
    attention_bias: _Flag = None
    use_qk_norm: _Flag = None
    use_mtp: _Flag = None
    topk_method: _Text = None
    quantization_config: dict[str, Any] | None = None  # has the keys of `QuantizationFields`
    text_config: dict[str, Any] | None = None  # has these keys
    stacked_experts: _Flag = None  # this package's own, as the next: of megatron checkpoints
    stacked_drafts: _Flag = None


def read_config(folder: Path) -> Fields:
    """Returns the keys of a folder's config.json. Raises ConfigError if it is missing or torn."""
    path = folder / "config.json"
    return Fields(read_json(path, JsonFields).model_extra or {}, path, ConfigFields)


class GenerationFields(JsonFields):
    """generation_config.json."""

    eos_token_id: int | list[int] | None = None
