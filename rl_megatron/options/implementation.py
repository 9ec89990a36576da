"""Which layers compute the decoder: TransformerEngine's, or torch's. Options that depend on it ask here."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

from rl_megatron.errors import ConfigError

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


GROUPED_COLUMNS = 8
"""Of what columns grouped products take multiples: rows must be aligned to 16 bytes, and elements are bfloat16."""


def uses_transformer_engine(learner: LearnerSection, shape: ModelShape) -> bool:
    """Whether to use TransformerEngine's layers. Raises ConfigError if they are requested, but missing."""
    there = importlib.util.find_spec("transformer_engine") is not None
    if learner.layers == "transformer_engine" and not (there and learner.device == "cuda"):
        raise ConfigError(
            f"learner.layers=transformer_engine with learner.device={learner.device}: TransformerEngine is "
            f"{'installed' if there else 'not installed'} and needs CUDA; set learner.layers=auto or torch"
        )
    return there and wants_transformer_engine(learner, shape)


def wants_transformer_engine(learner: LearnerSection, shape: ModelShape) -> bool:
    """Whether to use TransformerEngine's layers where it is installed: for plans, which a login node makes."""
    wanted = learner.device == "cuda" and learner.layers in ("auto", "transformer_engine")
    return wanted and torch_only(shape) is None and not half_attention_alone(learner)


def multiplies_at_once(learner: LearnerSection, shape: ModelShape) -> bool:
    """Whether torch's layers multiply by all experts of a rank in one call (`learner.model.kernels.grouped`), and hold
    the results of all; else by one after the other. Plans take GPUs for those of Hopper or Blackwell."""
    d = learner.dims
    cut = 1 if shape.expert_bias or shape.stacked_experts else d.etp
    sizes = (shape.hidden_size, shape.expert_width // cut)
    on_gpu = learner.device == "cuda" and learner.dtype == "bfloat16" and not wants_transformer_engine(learner, shape)
    return on_gpu and all(size % GROUPED_COLUMNS == 0 for size in sizes)


def torch_only(shape: ModelShape) -> str | None:
    """The part that only our torch layers support, on GPUs too; None if TransformerEngine supports all."""
    parts = {
        "gated delta nets": bool(shape.delta_layers),
        "zero-centred norms": shape.zero_centered,
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
    """Whether megatron-core's own latent attention over TransformerEngine supports ``shape``."""
    rope, latent = shape.rope, shape.latent
    if latent is None:
        return True
    known = rope.kind == "default" or (rope.kind == "yarn" and rope.truncate)
    factor = rope.grown(rope.paired_mscale) / rope.grown(rope.mscale_all_dim)
    return known and math.isclose(rope.attention_factor, factor) and shape.norm_eps == latent.norm_eps


def half_attention_alone(learner: LearnerSection) -> bool:
    """Whether TransformerEngine 2.11 lacks an attention kernel: its unfused one does not support context parallelism,
    and the fused ones need half precision."""
    return learner.cp > 1 and learner.dtype == "float32"
