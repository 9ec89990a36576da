"""The kernels of a decoder layer, TransformerEngine's or torch's, and the bytes that the layer keeps of each token.

A layer keeps activations for its backward pass; recomputing parts of the layer frees some of them.

tests/distributed/test_kept.py counts the bytes of torch's layers on real ones. The bytes of TransformerEngine's layers
follow from its source and megatron-core's. In float8 linears keep their inputs in float8, except inputs that other
modules keep in bfloat16 anyway (megatron-core's ``set_save_original_input``). Scales are not counted. Attention keeps
no scores (FlashAttention), and experts are evenly loaded. Not counted are rotary angles (once a micro-batch), the
padding of sequences to a common length, and the masks that torch's attention needs for windows, sinks and cp > 1.

But torch's attention has no fused kernel on GPUs for grouped queries with such a mask, or in float32. It then computes
in float32, with keys and values repeated for all heads, and keeps a probability for each query, head and key
(`_plain`; read in ATen's sdp_utils.cpp). In half precision cuDNN may have a fused kernel, which is not counted on.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl_megatron.errors import ConfigError
from rl_megatron.rules import SET, TEXT, On
from rl_megatron.types import BYTES

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

TORCH_ONLY = On("torch_only", SET, TEXT)
"""A test of `torch_only`, for rows of the learner with ``where="shape"``."""
GROUPED_COLUMNS = 8
"""Grouped products take multiples of this many columns: rows must be aligned to 16 bytes, and elements are bfloat16."""
_FLOAT = 4  # bytes: norms' scales, softmax's sums and router's probabilities are float32
_GRADIENTS = 1.25  # ratio of a delta net's bytes in the backward pass to those after the forward pass: 1.15 to 1.32
_SINK = 8  # columns that a sink adds to queries, keys, values and the output


def uses_transformer_engine(learner: LearnerSection, shape: ModelShape) -> bool:
    """True if the run uses TransformerEngine's layers. Raises ConfigError if they are requested, but cannot run."""
    there = importlib.util.find_spec("transformer_engine") is not None
    if learner.layers == "transformer_engine" and not (there and learner.device == "cuda"):
        raise ConfigError(
            f"learner.layers=transformer_engine with learner.device={learner.device}: TransformerEngine is "
            f"{'installed' if there else 'not installed'} and needs CUDA; set learner.layers=auto or torch"
        )
    return there and wants_transformer_engine(learner, shape)


def require_transformer_engine(key: str, learner: LearnerSection, shape: ModelShape) -> None:
    """Raises ConfigError for ``key`` with its value, which takes TransformerEngine's layers, if it is not installed."""
    if not uses_transformer_engine(learner, shape):
        raise ConfigError(f"{key}: TransformerEngine is not installed here; install it, or leave it out")


def wants_transformer_engine(learner: LearnerSection, shape: ModelShape) -> bool:
    """True if TransformerEngine's layers are used where it is installed. A login node's plans assume that it is."""
    wanted = learner.device == "cuda" and learner.layers in ("auto", "transformer_engine")
    lacking = learner.cp > 1 and learner.dtype == "float32"  # attention: 2.11's unfused one has no cp, others are half
    return wanted and torch_only(shape) is None and not lacking


def uses_grouped_gemm(learner: LearnerSection, shape: ModelShape) -> bool:
    """True if torch's layers multiply by all experts of a rank in one call (`learner.model.kernels.grouped`) and hold
    all results. Otherwise they multiply by one expert after the other. Plans assume Hopper or Blackwell GPUs."""
    d = learner.dims
    cut = 1 if shape.expert_bias or shape.stacked_experts else d.etp
    sizes = (shape.hidden_size, shape.expert_width // cut)
    on_gpu = learner.device == "cuda" and learner.dtype == "bfloat16" and not wants_transformer_engine(learner, shape)
    return on_gpu and all(size % GROUPED_COLUMNS == 0 for size in sizes)


def torch_only(shape: ModelShape) -> str | None:
    """The part that only our torch layers support, on GPUs too; None if TransformerEngine supports all."""
    parts = {
        "gated delta nets": bool(shape.delta_layers),
        "zero-centered norms": shape.zero_centered,
        "sliding windows": any(shape.windows),
        "attention sinks": shape.sinks,
        "norms over all heads": shape.qk_norm == "all",
        "fused experts with biases": shape.expert_bias,
        "experts of one tensor a layer": shape.stacked_experts,
        "the indexer of sparse attention": shape.indexer is not None,
        "a factor on rotary embeddings": shape.latent is None and shape.rope.attention_factor != 1,
        "latent attention with these norms or rotary embeddings": not _has_latent(shape),
    }
    return next((part for part, there in parts.items() if there), None)


def _has_latent(shape: ModelShape) -> bool:
    """True if megatron-core's own latent attention over TransformerEngine supports ``shape``."""
    rope, latent = shape.rope, shape.latent
    if latent is None:
        return True
    known = rope.kind == "default" or (rope.kind == "yarn" and rope.truncate)
    factor = rope.grown(rope.paired_mscale) / rope.grown(rope.mscale_all_dim)
    return known and math.isclose(rope.attention_factor, factor) and shape.norm_eps == latent.norm_eps


def activation_bytes(learner: LearnerSection, shape: ModelShape, layer: int, longest: float = 0) -> float:
    """Bytes that ``layer`` keeps of each token of a context-parallel rank, on one rank of a tensor-parallel group.

    ``longest``: tokens of a sequence, which plain attention's probabilities grow with.
    """
    return sum(halves(learner, shape, layer, longest).values())


def halves(learner: LearnerSection, shape: ModelShape, layer: int, longest: float = 0) -> Mapping[str, float]:
    """The bytes of `activation_bytes` by half of ``layer``, each with its norm: "attention", and "moe" or "mlp"."""
    fused = wants_transformer_engine(learner, shape)
    size, given, moe = BYTES[learner.dtype], _given(learner, fused), layer in shape.moe_layers
    hidden = shape.hidden_size
    norm = float(hidden * size + _FLOAT)  # the input and the scale; the lines below add the output
    attention = norm + hidden * (given if shape.latent is None else size)
    if shape.delta is not None and layer in shape.delta_layers:  # inputs and outputs of its linears, nothing else
        attention += (shape.delta.inputs + shape.delta.outputs) * size
    else:
        attention += _grouped(learner, shape, fused) if shape.latent is None else _latent(learner, shape, fused)
        attention += _plain(learner, shape, layer, longest) + _sparse(learner, shape, layer, longest)
    mlp = norm + hidden * (size if moe else given)
    mlp += _experts(learner, shape, fused) if moe else _gated(shape.dense_width, learner, fused)
    return {"attention": attention / learner.tp, "moe" if moe else "mlp": mlp / learner.tp}


def offloaded(learner: LearnerSection, shape: ModelShape, layer: int, longest: float = 0) -> list[float]:
    """The bytes of those `halves` of ``layer`` that ``learner.offload.activations`` moves to the host's memory."""
    parts = learner.offload.activations
    if not parts:
        return []
    return [held for half, held in halves(learner, shape, layer, longest).items() if half in parts]


def probabilities(learner: LearnerSection, shape: ModelShape, layer: int, longest: float) -> float:
    """Bytes of the probabilities that `activation_bytes` includes."""
    return shape.num_heads * longest * _FLOAT / learner.tp if _is_plain(learner, shape, layer, longest) else 0.0


def delta_bytes(learner: LearnerSection, shape: ModelShape, layer: int) -> float:
    """Bytes of each token that a delta net of ``layer`` holds while it computes, and then frees; 0 for other layers.

    These are queries, keys and values before and after the convolution, and the float32 values that its chunks need of
    each other. tests/unit/options/test_bytes.py measures them.
    """
    m = shape.delta
    if m is None or layer not in shape.delta_layers:
        return 0.0
    of_value_head = 3 * m.key_dim + 4 * m.value_dim + 4 * m.chunk + 3 * m.key_dim * m.value_dim / m.chunk
    of_key_head = 2 * m.chunk + 8 * m.key_dim
    wide = (m.value_heads * of_value_head + m.key_heads * of_key_head) * _FLOAT
    return _GRADIENTS * (wide + 3 * m.mixed * BYTES[learner.dtype]) / learner.tp


def _given(learner: LearnerSection, fused: bool) -> int:
    """Bytes of an element of a linear's input as it keeps it."""
    return 1 if fused and learner.fp8 is not None else BYTES[learner.dtype]


def freed(learner: LearnerSection, shape: ModelShape, layer: int, longest: float = 0) -> Mapping[str, float]:
    """Returns the bytes of `activation_bytes` that each of megatron-core's ``recompute_modules`` frees; ``moe``
    includes its parts."""
    fused, size = wants_transformer_engine(learner, shape), BYTES[learner.dtype]
    hidden = shape.hidden_size * size
    out = {"core_attn": 0.0, "mla_up_proj": 0.0, "layernorm": 0.0}
    if shape.latent is not None:
        out["mla_up_proj"] = _up_projected(learner, shape, fused)
    elif not fused and layer not in shape.delta_layers:  # fused attention keeps only its inputs, which it needs again
        out["core_attn"] = _attended(learner, shape) - _attention_inputs(learner, shape)
        out["core_attn"] += _plain(learner, shape, layer, longest)
    if layer in shape.moe_layers:
        out["moe"], out["moe_act"] = _experts(learner, shape, fused), _activated(learner, shape, fused)
        out["shared_experts"] = _shared(shape, learner, fused)
    else:
        own = shape.hidden_size * _given(learner, fused) + _FLOAT  # the norm is a part of it
        out["mlp"] = own + _gated(shape.dense_width, learner, fused)
    if fused:  # norms that are not part of a linear
        out["layernorm"] = hidden * ((shape.latent is not None) + (layer in shape.moe_layers))
    return {module: count / learner.tp for module, count in out.items()}


def _grouped(learner: LearnerSection, shape: ModelShape, fused: bool) -> float:
    """Grouped-query attention: queries, keys and values as projected, normed and rotated, and the output."""
    size, heads, groups, d = BYTES[learner.dtype], shape.num_heads, shape.num_kv_heads, shape.head_dim
    if fused:
        norms = _head_norms(learner, shape, copies=True, projected=False)
        return 3 * (heads + groups) * d * size + heads * _FLOAT + norms
    gate = 2 * size + _FLOAT if shape.output_gate else 0  # the gate as projected and as a factor, and its multiplicand
    return _attended(learner, shape) + heads * d * (size + gate) + _norms(learner, shape)


def _attended(learner: LearnerSection, shape: ModelShape) -> float:
    """Bytes that torch's attention keeps, with one sequence in a row, and the keys and values of all cp ranks."""
    heads, groups = shape.num_heads, shape.num_kv_heads
    wide = shape.head_dim + (_SINK if shape.sinks else 0)
    return (2 * heads + 2 * groups * learner.cp) * wide * BYTES[learner.dtype] + heads * _FLOAT


def _is_plain(learner: LearnerSection, shape: ModelShape, layer: int, longest: float) -> bool:
    """True if torch has no fused kernel for the attention of ``layer`` on a GPU."""
    if layer in shape.delta_layers:
        return False
    if wants_transformer_engine(learner, shape) or learner.device != "cuda" or shape.latent is not None or not longest:
        return False
    grouped = shape.num_heads // learner.tp != max(shape.num_kv_heads // learner.tp, 1)
    window = shape.windows[layer] if shape.windows else 0
    masked = shape.sinks or learner.cp > 1 or 0 < window < longest
    return grouped and (masked or learner.dtype == "float32")


def _plain(learner: LearnerSection, shape: ModelShape, layer: int, longest: float) -> float:
    """Bytes that plain attention keeps above `_attended`: probabilities, and all heads' queries, keys and values."""
    if not _is_plain(learner, shape, layer, longest):
        return 0.0
    wide = shape.head_dim + (_SINK if shape.sinks else 0)
    columns = shape.num_heads * (wide * (1 + 2 * learner.cp) + longest)
    return columns * _FLOAT - _attended(learner, shape)


def _attention_inputs(learner: LearnerSection, shape: ModelShape) -> float:
    """Bytes that recomputing torch's attention needs, and its norms do not keep: queries, keys, and the projection."""
    size, heads, groups = BYTES[learner.dtype], shape.num_heads, shape.num_kv_heads
    copies = shape.qk_norm is not None or groups > learner.tp
    projected = shape.qk_norm is None or (shape.qk_norm == "all" and size < _FLOAT)
    columns = (heads if copies else 0) + (groups if shape.qk_norm else 0) + (heads + 2 * groups if projected else 0)
    return columns * shape.head_dim * size


def _sparse(learner: LearnerSection, shape: ModelShape, layer: int, longest: float) -> float:
    """Bytes that attention to chosen keys keeps above `_latent`: int32 keys of its indexer, whole on every TP rank. It
    computes the output and the sums of softmax again."""
    m, latent = shape.indexer, shape.latent
    if m is None or latent is None or longest <= m.top_k:
        return 0.0
    chosen = m.top_k * _FLOAT * learner.tp if layer in m.layers else 0
    return chosen - shape.num_heads * (latent.value_dim * BYTES[learner.dtype] + _FLOAT)


def _norms(learner: LearnerSection, shape: ModelShape) -> float:
    """The norms of queries and keys in torch's layers."""
    if shape.qk_norm is None:
        return 0.0
    by_head = _head_norms(learner, shape, copies=shape.num_kv_heads > learner.tp, projected=True)
    if shape.qk_norm == "head":
        return by_head
    size, both = BYTES[learner.dtype], (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    wide = both * _FLOAT if size < _FLOAT else by_head
    return wide + both * size


def _head_norms(learner: LearnerSection, shape: ModelShape, *, copies: bool, projected: bool) -> float:
    """Norms of each head: their scales, a copy of the queries, and, if ``projected``, the projection that they read."""
    if shape.qk_norm is None:
        return 0.0
    heads, groups = shape.num_heads, shape.num_kv_heads
    columns = (heads if copies else 0) + (heads + 2 * groups if projected else 0)
    return columns * shape.head_dim * BYTES[learner.dtype] + (heads + groups) * _FLOAT


def _latent(learner: LearnerSection, shape: ModelShape, fused: bool) -> float:
    """Latent attention: latents before and after their norms, queries, keys and values as attended, and the output."""
    m, heads = shape.latent, shape.num_heads
    assert m is not None
    rank = (m.query_rank or 0) + m.kv_rank
    latents = (rank + m.rope_dim) * BYTES[learner.dtype] + rank * _given(learner, fused)  # norms' inputs and outputs
    head, value, ranks = m.nope_dim + m.rope_dim, m.value_dim, 1 if fused else learner.cp
    attended = head + ranks * (head + value) + value
    rows = 0 if fused else value  # the output, laid out as it was before attention
    scales = (heads + 1 + (m.query_rank is not None)) * _FLOAT
    return latents + heads * (attended + rows) * BYTES[learner.dtype] + scales


def _up_projected(learner: LearnerSection, shape: ModelShape, fused: bool) -> float:
    """Queries, keys and values of latent attention, and the normed latents that they are projected from."""
    m, ranks = shape.latent, 1 if fused else learner.cp
    assert m is not None
    head, rank = m.nope_dim + m.rope_dim, (m.query_rank or 0) + m.kv_rank
    columns = shape.num_heads * (head + ranks * (head + m.value_dim))
    scales = (1 + (m.query_rank is not None)) * _FLOAT
    return columns * BYTES[learner.dtype] + rank * _given(learner, fused) + scales


def _gated(width: int, learner: LearnerSection, fused: bool) -> float:
    """SwiGLU: gate and up in one, and their product; torch's layers also keep the gate's silu and a copy of up."""
    size = BYTES[learner.dtype]
    return (2 * size + _given(learner, fused) if fused else 5 * size) * width


def _shared(shape: ModelShape, learner: LearnerSection, fused: bool) -> float:
    """Shared experts: an MLP, and their output before a gate with the gate's value."""
    gate = (shape.hidden_size + 1) * BYTES[learner.dtype] if shape.shared_gate else 0
    return _gated(shape.shared_width, learner, fused) + gate


def _experts(learner: LearnerSection, shape: ModelShape, fused: bool) -> float:
    """The router's choice, the rows of the chosen experts, and shared experts."""
    size, hidden, width, chosen = BYTES[learner.dtype], shape.hidden_size, shape.expert_width, shape.experts_per_token
    scores_all = shape.router.score == "sigmoid" or not shape.normalize_top_k
    router = shape.num_experts * (12 if fused else 9 if scores_all else 5)
    product = width if fused else 0
    rows: float = (hidden * learner.dims.etp + product) * _given(
        learner, fused
    ) + 2 * width * size  # the rest: gate and up
    if shape.expert_bias:
        rows = (hidden + _biased(learner, shape)) * size
    places = 24  # bytes of a choice: its expert, weight and place among the rows
    return router + chosen * (rows + places) + _shared(shape, learner, fused)


def _activated(learner: LearnerSection, shape: ModelShape, fused: bool) -> float:
    """Bytes that ``moe_act`` frees. TransformerEngine's experts keep gate and up even if they are recomputed."""
    width = shape.expert_width * (_given(learner, fused) if fused else 2 * BYTES[learner.dtype])
    own = _biased(learner, shape) * BYTES[learner.dtype]
    return shape.experts_per_token * (own if shape.expert_bias else width)


def _biased(learner: LearnerSection, shape: ModelShape) -> float:
    """Elements that experts with biases keep of a row, besides the row. One call for all experts keeps twice which
    expert the row belongs to; one expert after the other keeps the output."""
    if uses_grouped_gemm(learner, shape):
        return 8 * shape.expert_width + 2 * shape.num_experts / learner.ep
    return shape.hidden_size + 7 * shape.expert_width
