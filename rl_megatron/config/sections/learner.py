"""The ``learner`` section: device, layout and memory of the megatron-core learner; ``roles``: models beside it."""

from __future__ import annotations

import math
from typing import Literal

from rl_megatron.config.sections.algorithm import OptimizerSection
from rl_megatron.section import Positive, PositiveFloat, Section
from rl_megatron.types import ParallelDims


class LearnerSection(Section):
    """The megatron-core learner. ``etp``, ``dp`` and ``threads`` follow from the others when not given."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu over gloo, cuda over NCCL."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations; the optimizer keeps float32."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """auto takes TransformerEngine's where it is installed and device=cuda, else torch's, and with float32 and cp > 1,
    for which it has no attention."""
    tp: Positive = 1
    """Tensor-parallel degree, with sequence parallelism where above 1."""
    pp: Positive = 1
    """Pipeline-parallel degree."""
    vpp: Positive = 1
    """Model chunks of each pipeline stage (interleaved schedule)."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: as the stages between, which share the rest equally."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; null: as the stages between."""
    ep: Positive = 1
    """Expert-parallel degree."""
    etp: Positive | None = None
    """Tensor-parallel degree inside an expert; null: tp where ep=1, else 1."""
    cp: Positive = 1
    """Context-parallel degree."""
    dp: Positive | None = None
    """Data-parallel degree; null: the least that makes room for ep*etp."""
    threads: Positive | None = None
    """CPU threads of each process; null shares the machine's cores out."""
    max_tokens_per_micro_batch: Positive = 8192
    """Positions of a packed micro-batch on one data-parallel rank."""
    vocab_multiple: Positive = 8
    """Vocabulary rows are padded to a multiple of this times tp."""
    logprob_chunk_tokens: Positive = 1024
    """Positions whose logits are held in float32 at once."""
    recompute_layers: bool = False
    """Whether to recompute activations of every layer in the backward pass."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a collective may wait for its ranks."""
    optimizer: OptimizerSection = OptimizerSection()

    @property
    def dims(self) -> ParallelDims:
        """All degrees. etp defaults to tp without expert parallelism, else 1; dp to the least that fits ep*etp."""
        etp = self.etp or (self.tp if self.ep == 1 else 1)
        experts = self.ep * etp
        dp = self.dp or experts // math.gcd(experts, self.tp * self.cp)
        return ParallelDims(tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=etp, cp=self.cp, dp=dp)

    @property
    def half_attention_alone(self) -> bool:
        """Whether TransformerEngine 2.11 has no attention kernel for this: its own is off under context parallelism,
        and the fused ones want half precision."""
        return self.cp > 1 and self.dtype == "float32"


class RolesSection(Section):
    """Whose processes hold the models beside the policy; what is trained is the same to the bit."""

    critic: Literal["learner", "separate"] = "learner"
    """learner: each learner rank holds its part of it; separate: as many ranks of its own, in the learner's layout,
    work while the learner's do."""
    reference: Literal["learner", "separate"] = "learner"
    """As ``roles.critic``."""

    @property
    def separate(self) -> tuple[str, ...]:
        """The roles with ranks of their own, in the order of a job's nodes."""
        return tuple(role for role in RolesSection.model_fields if getattr(self, role) == "separate")
