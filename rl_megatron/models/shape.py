"""Sizes and kinds of a decoder's parts, read from a Hugging Face ``config.json``. Plain numbers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

_MOST_EXPERTS = 1_000_000  # in all layers; those of a trillion parameters are 23,000


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); the last three are a head's.

    ``query_rank`` is None where queries have no latent (DeepSeek-V2-Lite). The latents' norms have ``norm_eps``;
    transformers gives them no other, whatever rms_norm_eps is.
    """

    norm_eps: ClassVar[float] = 1e-6
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How rotary angles differ from plain ones of `ModelShape.rope_theta`; the default is not at all.

    The first ``dim`` of a head turn, 0 meaning all. ``linear`` uses ``factor`` alone; ``llama3`` (transformers
    ``modeling_rope_utils.py``) the two frequencies as well; ``yarn`` (arXiv:2309.00071) the two betas. Cosine and sine
    are multiplied by ``attention_factor``; the two mscales are DeepSeek's, 0 where a config has none.
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
        """``mscale``, which transformers takes only with the other; else 1."""
        return self.mscale if self.mscale and self.mscale_all_dim else 1.0

    def grown(self, mscale: float) -> float:
        """YaRN's factor; 1 where the context is not stretched or ``mscale`` is 0."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How tokens choose experts; `ModelShape` has how many, and whether the chosen weights are made to add up to 1.

    ``selection_bias`` is a buffer that is added to the scores for the choice alone (DeepSeek-V3's
    ``e_score_correction_bias``), ``logit_bias`` a parameter of the router's linear (gpt-oss). Of ``groups`` equal
    groups of experts only the best ``top_groups`` are chosen from, by ``group_score``: the sum of their two best scores
    or the best alone.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    logit_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one decoder, global (not per rank), in Hugging Face's meaning.

    Without the fields that have a default it is Qwen3-MoE. ``num_experts`` is 0 for a dense model; else the first
    ``dense_layers`` have one MLP of ``dense_width``, as all layers of a dense model have, and the others experts beside
    shared experts of ``shared_width`` in all. ``qk_norm`` is over each head, over all heads at once, or not there.
    ``windows`` has for each layer how many positions a query sees, itself among them, 0 meaning all; empty is all 0.
    ``expert_bias`` and ``clamped_swiglu`` (the limit, 0 for plain SwiGLU) are gpt-oss's. ``draft_layers`` behind the
    decoder, for multi-token prediction, are in some checkpoints; nothing here reads or writes them.

    ``family`` is the ``model_type`` of config.json. ``family_at`` says where a family of the user's own is defined, as
    ``package.module:name``, so that every process that gets the shape finds its rows.
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
    expert_bias: bool = False
    clamped_swiglu: float = 0.0
    draft_layers: int = 0

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions turn."""
        return self.rope.dim or (self.latent.rope_dim if self.latent else self.head_dim)

    @property
    def moe_layers(self) -> range:
        """The layers with experts."""
        return range(self.dense_layers if self.num_experts else self.num_layers, self.num_layers)

    @property
    def uniform(self) -> bool:
        """All layers have the same parts."""
        return not (self.num_experts and self.dense_layers)

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with: its experts only, the output layer included."""
        sparse, width = len(self.moe_layers), self.experts_per_token * self.expert_width + self.shared_width
        experts = sparse * (3 * width + self.num_experts) + (self.num_layers - sparse) * 3 * self.dense_width
        return self.hidden_size * (self.num_layers * self._attention_columns + experts + self.vocab_size)

    @property
    def _attention_columns(self) -> int:
        """Parameters of one layer's attention over the hidden size (a latent's up projections counted by theirs)."""
        if self.latent is None:
            return (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        m, heads = self.latent, self.num_heads
        query = heads * self.head_dim if m.query_rank is None else m.query_rank
        up = m.kv_rank * heads * (m.nope_dim + m.value_dim) + (m.query_rank or 0) * heads * self.head_dim
        return query + m.kv_rank + m.rope_dim + heads * m.value_dim + up // self.hidden_size


def shape_problems(m: ModelShape) -> Iterator[str]:
    """What no model can be, whatever its family."""
    if m.num_heads % m.num_kv_heads:
        yield f"{m.num_kv_heads} key and value heads do not divide {m.num_heads} attention heads"
    if not 0 < m.rotary_dim <= m.head_dim or m.rotary_dim % 2:
        yield f"{m.rotary_dim} of a head's {m.head_dim} dimensions turn; an even number of them must"
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
