"""``learner.batch_invariant``: kernels for which a token's log-prob does not depend on its micro-batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.errors import ConfigError
from rl_megatron.options.implementation import torch_only, uses_transformer_engine
from rl_megatron.options.option import Attention, Keywords, Option
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

_THIRD = ("flash_attn_interface", "flash_attn_3")
_KERNELS = (*_THIRD, "flash_attn")
_GIVEN = "learner.batch_invariant=true"


class BatchInvariantKeys(Section):
    """The key of `BatchInvariant`."""

    batch_invariant: bool = False
    """Whether products, norms and attention of TransformerEngine's layers use megatron-core's kernels in which a row's
    sums do not depend on the other rows, on GPUs, for models without experts; slower. Not run; whether log-probs are
    then equal to the bit is not measured (docs/mismatch.md)."""


class BatchInvariant(Option):
    """Megatron-core's ``batch_invariant_mode``, whose kernels `learner.model.build` puts in.

    They are Triton's, in place of TransformerEngine's ``general_gemm`` and RMSNorm and of torch's products, means and
    log-softmax; attention is FlashAttention's in one split (custom_layers/batch_invariant_kernels.py of 0.16.1).
    """

    keys = BatchInvariantKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """CPUs, float32, torch's layers, experts, and sums of more than two ranks."""
        if not learner.batch_invariant:
            return
        if learner.device == "cpu":
            yield f"{_GIVEN} with learner.device=cpu: its kernels need GPUs; leave it out"
        if learner.dtype == "float32":
            yield f"{_GIVEN} with learner.dtype=float32: FlashAttention takes half precision; set bfloat16"
        if learner.cp > 1:
            yield (
                f"{_GIVEN} with learner.cp={learner.cp}: TransformerEngine's attention over cp calls FlashAttention 2, "
                "whose splits are not fixed (megatron-core 0.19 refuses it); set learner.cp=1"
            )
        if learner.head_dtype is not None:
            yield (
                f"{_GIVEN} with learner.head_dtype={learner.head_dtype}: its kernel multiplies float32 in TF32, with "
                "10 bits; leave one of them out"
            )
        if learner.layers == "torch" or learner.own_layers is not None:
            yield (
                f"{_GIVEN} with learner.layers={learner.layers}: megatron-core has such kernels for "
                "TransformerEngine's layers alone; set learner.layers=auto"
            )
        if learner.tp > 2:
            yield (
                f"{_GIVEN} with learner.tp={learner.tp}: NCCL adds the ranks' parts of a token in an order that "
                "depends on its place in the micro-batch, which two parts alone do not show; set learner.tp to 1 or 2"
            )
        if shape is not None and shape.num_experts:
            yield (
                f"{_GIVEN}: megatron-core 0.16.1 has no such kernels for experts' grouped products, and "
                f"model_type={shape.family!r} has experts; leave it out"
            )
        elif shape is not None and (part := torch_only(shape)) is not None:
            yield f"{_GIVEN}: the model has {part}, which torch's layers alone compute; leave it out"

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The mode, and FlashAttention. Raises ConfigError if TransformerEngine or FlashAttention is not installed."""
        if not learner.batch_invariant:
            return Keywords()
        if not uses_transformer_engine(learner, shape):
            raise ConfigError(f"{_GIVEN}: TransformerEngine is not installed here; install it, or leave it out")
        if not any(importlib.util.find_spec(name) for name in _KERNELS):
            raise ConfigError(f"{_GIVEN}: FlashAttention is not installed here; install it, or leave it out")
        return Keywords(model={"batch_invariant_mode": True, "attention_backend": Attention("flash")})


def flash_attention() -> int:
    """The generation of FlashAttention that is installed and that a newer megatron-core (0.19) takes for this mode.

    Raises ConfigError if there is none.
    """
    if any(importlib.util.find_spec(name) for name in _THIRD):
        return 3
    raise ConfigError(
        f"{_GIVEN}: the megatron-core here takes FlashAttention 3 for it, which is not installed; install it "
        "(flash_attn_3), take megatron-core 0.16.1, or leave it out"
    )
