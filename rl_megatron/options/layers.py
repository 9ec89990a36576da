"""``learner.layers``: TransformerEngine's layers with fused kernels, torch layers, or your own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rl_megatron.options.implementation import half_attention_alone, torch_only, uses_transformer_engine
from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import OwnCode, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class LayersKeys(Section):
    """The key of `Layers`."""

    layers: Literal["auto", "torch", "transformer_engine"] | OwnCode = "auto"
    """Implementation of the decoder layers. auto: TransformerEngine's if it is installed, device=cuda, and it supports
    the model (it has no float32 attention with cp > 1), else torch's. It groups experts' products in one call, as
    torch's do in bfloat16 on Hopper and Blackwell; else torch's are one expert after the other. ``package.module:name``
    is a function of your own, ``(shape, layer) -> ModuleSpec`` of megatron's, called for each decoder layer from 0 on
    (docs/weights.md). Its code is run."""

    @property
    def own_layers(self) -> str | None:
        """``layers`` if it names code of the user's own, else None."""
        return self.layers if ":" in self.layers else None


class Layers(Option):
    """Turns on fusions that need CUDA kernels only with TransformerEngine's layers."""

    keys = LayersKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Reasons why TransformerEngine cannot run the layers, if it is requested."""
        if learner.layers != "transformer_engine":
            return
        if half_attention_alone(learner):
            yield (
                f"learner.layers=transformer_engine with learner.cp={learner.cp} and learner.dtype=float32: under "
                "context parallelism TransformerEngine has attention kernels for half precision only; set "
                "learner.dtype=bfloat16, or learner.layers=auto, which then uses torch's layers"
            )
        if shape is not None and (lacking := torch_only(shape)):
            yield (
                f"learner.layers=transformer_engine: model_type={shape.family!r} has {lacking}, which only our own "
                "layers support; set learner.layers=auto or torch"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Whether kernels are fused. Never fuses gradient accumulation into a linear's backward, which needs apex."""
        fused = uses_transformer_engine(learner, shape)
        latent = fused and shape.latent is not None
        names = ["bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm"]
        names += [] if latent else ["apply_rope_fusion"]
        return Keywords(model={"gradient_accumulation_fusion": False, **dict.fromkeys(names, fused)})
