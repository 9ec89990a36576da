"""Sizes and kinds of a decoder's parts, read from a Hugging Face ``config.json``. Plain numbers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

STACKED = ("stacked_experts", "stacked_drafts")
"""Fields of `ModelShape` that this package writes into the config.json of a megatron checkpoint."""
_MOST_EXPERTS = 1_000_000  # experts of all layers; models of a trillion parameters have 23,000


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); the last three are a head's.

    ``query_rank`` is None if queries have no latent (DeepSeek-V2-Lite). The latents' norms use ``norm_eps``, as in
    transformers, which ignores rms_norm_eps there.
    """

    norm_eps: ClassVar[float] = 1e-6
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Sizes of the indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556), which chooses the ``top_k`` keys that
    a query attends to. ``layers`` have one; others take the choice of the last before them. The first numbers of its
    queries and keys turn, with ``interleaved`` in pairs (0, 1), (2, 3), …, otherwise in halves.

    Of at most ``top_k`` keys it chooses all: such sequences are computed without it. It is not trained.
    """

    heads: int
    head_dim: int
    top_k: int
    layers: tuple[int, ...]
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of gated delta nets (arXiv:2412.06464), which remember in place of attending: each of ``key_heads`` serves
    equally many of ``value_heads``, and a convolution of ``kernel`` positions stands before them. ``chunk`` positions
    are computed together."""

    chunk: ClassVar[int] = 64
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def mixed(self) -> int:
        """Channels of queries, keys and values, which the convolution mixes over positions."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def inputs(self) -> int:
        """Columns that the hidden states are projected to: those, the output's gate, and two numbers a value head."""
        return self.mixed + self.value_heads * (self.value_dim + 2)

    @property
    def outputs(self) -> int:
        """Columns of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The differences of rotary angles from plain ones of `ModelShape.rope_theta`; the defaults have none.

    The first ``dim`` dimensions of a head are rotated; 0 means all. ``linear`` uses only ``factor``; ``llama3``
    (transformers ``modeling_rope_utils.py``) also the two frequencies; ``yarn`` (arXiv:2309.00071) the two betas.
    ``attention_factor`` multiplies cosine and sine; the two mscales are DeepSeek's, 0 if the config has none.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    dim: int = 0
    factor: float = 1.0
    original_positions: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 1.0

    @property
    def paired_mscale(self) -> float:
        """``mscale``, which transformers uses only together with ``mscale_all_dim``; else 1."""
        return self.mscale if self.mscale and self.mscale_all_dim else 1.0

    def grown(self, mscale: float) -> float:
        """YaRN's factor on the magnitude; 1 if the context is not extended or ``mscale`` is 0."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The way tokens choose experts; `ModelShape` has their number, and whether the chosen weights are normalized to 1.

    ``selection_bias`` is a buffer that is added to the scores only for the choice (DeepSeek-V3's
    ``e_score_correction_bias``), ``logit_bias`` a parameter of the router's linear (gpt-oss). Tokens choose only from
    the best ``top_groups`` of ``groups`` equal groups of experts; ``group_score`` of a group is the sum of its two best
    scores, or its best score.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    logit_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's router and experts in Hugging Face's files, after the layer's own: ``prefix``, then those of
    an expert's gate, up and down, of the router and its selection bias, and of shared experts."""

    prefix: str = "mlp."
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate.weight"
    selection_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNames:
    """Hugging Face's names of a decoder: the ``prefix`` of all but its output layer, whose name is ``head``, and
    whether delta nets have two matrices of inputs, ``grouped`` by key head, in place of four."""

    prefix: str = "model."
    head: str = "lm_head"
    grouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one decoder, global (not per rank), in Hugging Face's meaning.

    With the defaults it is Qwen3-MoE. ``num_experts`` is 0 for a dense model: all of its layers have one MLP of
    ``dense_width``. Otherwise the first ``dense_layers`` do, and the others have experts, and shared experts of
    ``shared_width`` in total. ``qk_norm`` is over each head, over all heads together, or absent. ``windows`` has for
    each layer how many positions a query attends to, its own included; 0 means all, and empty means 0 for every layer.
    ``delta_layers`` have a ``delta`` net in place of attention. The attention of others is multiplied by the sigmoid of
    a gate with ``output_gate``, and that of shared experts with ``shared_gate``. ``zero_centered`` norms multiply by
    their weight plus 1, but for that of a delta net.
    Latent attention with an ``indexer`` is to the keys that it chooses.
    With ``stacked_experts`` files and learner have one tensor for all experts of a layer; others, one for each; draft
    layers of such a model have them so with ``stacked_drafts``.
    ``expert_bias`` and ``clamped_swiglu`` (the limit, 0 for plain SwiGLU) are gpt-oss's. Some checkpoints have
    ``draft_layers`` after the decoder, for multi-token prediction (DeepSeek-V3, arXiv:2412.19437). With
    ``num_draft_layers`` the model has them too, each like the decoder's last layer, otherwise they are left out.
    Tensors with names that begin with one of ``other_prefixes``, of draft layers without rows or of a tower for images,
    are never read. A model that ``has_score_head`` has one output in place of the vocabulary's: transformers'
    ``…ForSequenceClassification`` with one label.

    ``family`` is the ``model_type`` of config.json. ``family_at`` names the definition of a custom family,
    as ``package.module:name``, so that every process that gets the shape can import it.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    normalize_top_k: bool
    tie_embeddings: bool
    max_positions: int
    family: str = "qwen3_moe"
    family_at: str | None = None
    latent: LatentAttention | None = None
    indexer: Indexer | None = None
    dense_layers: int = 0
    dense_width: int = 0
    shared_width: int = 0
    rope: Rope = Rope()
    router: Router = Router()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "all"] | None = "head"
    sinks: bool = False
    windows: tuple[int, ...] = ()
    stacked_experts: bool = False
    stacked_drafts: bool = False
    expert_bias: bool = False
    clamped_swiglu: float = 0.0
    delta: DeltaNet | None = None
    delta_layers: tuple[int, ...] = ()
    output_gate: bool = False
    shared_gate: bool = False
    zero_centered: bool = False
    draft_layers: int = 0
    other_prefixes: tuple[str, ...] = ()
    num_draft_layers: bool = False
    has_score_head: bool = False

    @property
    def rotary_dim(self) -> int:
        """The number of a head's dimensions that are rotated."""
        return self.rope.dim or (self.latent.rope_dim if self.latent else self.head_dim)

    @property
    def widest_head(self) -> int:
        """Numbers of a head's key or of its value, whichever has more."""
        return self.head_dim if self.latent is None else max(self.head_dim, self.latent.value_dim)

    @property
    def moe_layers(self) -> range:
        """The layers with experts."""
        return range(self.dense_layers if self.num_experts else self.num_layers, self.num_layers)

    @property
    def route_dtype(self) -> Literal["uint8", "int16"]:
        """The smallest dtype that holds an expert's number."""
        return "uint8" if self.num_experts <= 256 else "int16"

    @property
    def drafted(self) -> range:
        """The numbers of the model's draft layers, which follow those of the decoder's."""
        return range(self.num_layers, self.num_layers + (self.draft_layers if self.num_draft_layers else 0))

    @property
    def uniform(self) -> bool:
        """True if all layers have the same parts."""
        return not (self.num_experts and self.dense_layers) and not self.delta_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.delta_layers)

    @property
    def places_of_layers(self) -> tuple[int, ...]:
        """The place of each layer among those of its kind, which attend or have a delta net."""
        kinds = [layer in self.delta_layers for layer in range(self.num_layers)]
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token is multiplied by: of experts only its own, and the output layer."""
        sparse, width = len(self.moe_layers), self.experts_per_token * self.expert_width + self.shared_width
        width_of_gate = 1 if self.shared_gate else 0
        experts = sparse * (3 * width + self.num_experts + width_of_gate)
        experts += (self.num_layers - sparse) * 3 * self.dense_width
        mixers = len(self.attention_layers) * self._attention_columns
        if self.delta is not None:
            mixers += len(self.delta_layers) * (self.delta.inputs + self.delta.outputs)
        return self.hidden_size * (mixers + experts + self.outputs)

    @property
    def outputs(self) -> int:
        """Number of values that the output layer has of a token: its logits, or its score."""
        return 1 if self.has_score_head else self.vocab_size

    @property
    def _attention_columns(self) -> int:
        """Number of one layer's attention parameters, divided by the hidden size."""
        if self.latent is None:
            queries = 3 * self.num_heads if self.output_gate else 2 * self.num_heads
            return (queries + 2 * self.num_kv_heads) * self.head_dim
        m, heads = self.latent, self.num_heads
        query = heads * self.head_dim if m.query_rank is None else m.query_rank
        up = m.kv_rank * heads * (m.nope_dim + m.value_dim) + (m.query_rank or 0) * heads * self.head_dim
        return query + m.kv_rank + m.rope_dim + heads * m.value_dim + up // self.hidden_size


def length_problem(m: ModelShape, named: str, length: int, dense: str | None = None) -> str | None:
    """Returns why sequences of ``length``, which ``named`` gives, are not computed; None if they are. ``dense`` is why
    attention is to all keys, if it is."""
    if length > m.max_positions:
        return f"{named} = {length} is more than the model's max_position_embeddings={m.max_positions}; lower them"
    if dense is None or m.indexer is None or length <= m.indexer.top_k:
        return None
    return f"{named} = {length} is more than index_topk={m.indexer.top_k} of model_type={m.family!r}: {dense}"


def shape_problems(m: ModelShape) -> Iterator[str]:
    """Yields contradictions that no model of any family can have."""
    if m.num_heads % m.num_kv_heads:
        yield f"{m.num_kv_heads} key and value heads do not divide {m.num_heads} attention heads"
    if not 0 < m.rotary_dim <= m.head_dim or m.rotary_dim % 2:
        yield f"{m.rotary_dim} of a head's {m.head_dim} dimensions are rotated; the number must be even"
    if m.delta is not None and m.delta.value_heads % m.delta.key_heads:
        yield f"{m.delta.key_heads} key heads of delta nets do not divide their {m.delta.value_heads} value heads"
    if m.indexer is not None and m.indexer.layers[:1] != (0,):
        yield "the first layer has no indexer; its indexer_types must begin with 'full'"
    if m.norm_eps <= 0 or m.rope_theta <= 0:
        yield f"rms_norm_eps={m.norm_eps:g} and rope_theta={m.rope_theta:g} must be above 0"
    if m.rope.kind == "llama3" and not m.rope.low_frequency < m.rope.high_frequency:
        yield f"low_freq_factor={m.rope.low_frequency:g} must be below high_freq_factor={m.rope.high_frequency:g}"
    if m.num_experts and not 1 <= m.experts_per_token <= m.num_experts:
        yield f"each token chooses {m.experts_per_token} of {m.num_experts} experts"
    if m.num_layers * m.num_experts > _MOST_EXPERTS:
        yield f"{m.num_experts} experts in {m.num_layers} layers; at most {_MOST_EXPERTS} in all are read"
    if m.num_experts and m.dense_layers > m.num_layers:
        yield f"{m.dense_layers} dense layers of {m.num_layers}"
    if m.num_experts and (m.num_experts % m.router.groups or m.router.top_groups > m.router.groups):
        yield f"{m.router.top_groups} of {m.router.groups} groups of {m.num_experts} experts: groups must be equal"
