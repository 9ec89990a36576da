"""``learner.layers``: TransformerEngine's layers with fused kernels, torch layers, or your own."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import OwnCode, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class LayersKeys(Section):
    """Its key."""

    layers: Literal["auto", "torch", "transformer_engine"] | OwnCode = "auto"
    """auto takes TransformerEngine's where it is installed and device=cuda, else torch's, and with float32 and cp > 1,
    for which it has no attention. ``package.module:name`` is a function of your own, ``(shape, layer) -> ModuleSpec``
    of megatron's, called for each decoder layer from 0 on (docs/weights.md). Its code is run."""

    @property
    def own_layers(self) -> str | None:
        """``layers`` where they are the user's own."""
        return self.layers if ":" in self.layers else None


class Layers(Option):
    """Fusions that want CUDA kernels are on only with TransformerEngine's layers."""

    keys = LayersKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """What TransformerEngine is asked for and has not."""
        if learner.layers != "transformer_engine":
            return
        if _half_attention_alone(learner):
            yield (
                f"learner.layers=transformer_engine with learner.cp={learner.cp} and learner.dtype=float32: under "
                "context parallelism it has attention kernels for half precision alone; set learner.dtype=bfloat16, or "
                "learner.layers=auto, which then takes torch's"
            )
        if shape is not None and (lacking := torch_only(shape)):
            yield (
                f"learner.layers=transformer_engine: model_type={shape.family!r} has {lacking}, for which our layers "
                "are used; use learner.layers=auto or torch"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Whether kernels are fused. Gradients are never added up inside a linear's backward, which wants apex."""
        fused = uses_transformer_engine(learner, shape)
        latent = fused and shape.latent is not None
        names = ["bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm"]
        names += ["moe_permute_fusion"] if shape.num_experts else []
        names += [] if latent else ["apply_rope_fusion"]
        return Keywords(model={"gradient_accumulation_fusion": False, **dict.fromkeys(names, fused)})


def uses_transformer_engine(learner: LearnerSection, shape: ModelShape) -> bool:
    """Whether layers are TransformerEngine's. Raises ConfigError where the machine lacks them."""
    there = importlib.util.find_spec("transformer_engine") is not None
    if learner.layers == "transformer_engine" and not (there and learner.device == "cuda"):
        raise ConfigError(
            f"learner.layers=transformer_engine with learner.device={learner.device}: TransformerEngine is "
            f"{'installed' if there else 'not installed'} and needs CUDA; use learner.layers=auto or torch"
        )
    wanted = (
        learner.layers in ("auto", "transformer_engine")
        and torch_only(shape) is None
        and not _half_attention_alone(learner)
    )
    return wanted and there and learner.device == "cuda"


def torch_only(shape: ModelShape) -> str | None:
    """The part for which our torch layers are used on GPUs too; None where TransformerEngine has them all."""
    parts = {
        "sliding windows": any(shape.windows),
        "attention sinks": shape.sinks,
        "norms over all heads": shape.qk_norm == "all",
        "fused experts with biases": shape.expert_bias,
        "a factor on rotary embeddings": shape.latent is None and shape.rope.attention_factor != 1,
        "latent attention with these norms or rotary embeddings": not _has_latent(shape),
    }
    return next((part for part, there in parts.items() if there), None)


def _has_latent(shape: ModelShape) -> bool:
    """Whether megatron-core's own latent attention, over TransformerEngine, computes what ``shape`` says."""
    rope, latent = shape.rope, shape.latent
    if latent is None:
        return True
    known = rope.kind == "default" or (rope.kind == "yarn" and rope.truncate)
    factor = rope.grown(rope.paired_mscale) / rope.grown(rope.mscale_all_dim)
    return known and math.isclose(rope.attention_factor, factor) and shape.norm_eps == latent.norm_eps


def _half_attention_alone(learner: LearnerSection) -> bool:
    """Whether TransformerEngine 2.11 has no attention kernel for this: its own is off under context parallelism, and
    the fused ones want half precision."""
    return learner.cp > 1 and learner.dtype == "float32"
