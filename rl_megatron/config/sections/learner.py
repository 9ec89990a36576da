"""The ``learner`` section: the keys of the learner's options, and its own; ``roles``: models with their own ranks."""

from __future__ import annotations

import math
from typing import Literal

from rl_megatron.options.device import DeviceKeys
from rl_megatron.options.dtype import DtypeKeys
from rl_megatron.options.experts import ExpertKeys
from rl_megatron.options.head import HeadKeys
from rl_megatron.options.layers import LayersKeys
from rl_megatron.options.optimizer import OptimizerKeys
from rl_megatron.options.pipeline import PipelineKeys
from rl_megatron.options.recompute import RecomputeKeys
from rl_megatron.options.replicas import ReplicaKeys
from rl_megatron.options.table import with_installed_keys
from rl_megatron.options.tensor import TensorKeys
from rl_megatron.section import OwnCode, Positive, PositiveFloat, Section
from rl_megatron.types import ParallelDims


class ModelKeys(Section):
    """What the model is."""

    model: OwnCode | None = None
    """Null: the family is that of ``model.path``'s config.json. A Family of your own, as ``package.module:name`` in a
    package that is installed (docs/weights.md), which reads that file in place of it. Its code is run."""


class WorkKeys(Section):
    """What a process is given to do, and with."""

    threads: Positive | None = None
    """CPU threads of each process; null: an equal share of the machine's cores."""
    max_tokens_per_micro_batch: Positive = 8192
    """Positions of a packed micro-batch on one data-parallel rank."""


class WorldKeys(Section):
    """What holds between processes."""

    timeout_seconds: PositiveFloat = 600.0
    """Time limit of a collective's wait for its ranks."""


@with_installed_keys
class LearnerSection(  # pydantic takes the keys of the last base first
    OptimizerKeys,
    WorldKeys,
    RecomputeKeys,
    HeadKeys,
    WorkKeys,
    ReplicaKeys,
    ExpertKeys,
    PipelineKeys,
    TensorKeys,
    LayersKeys,
    DtypeKeys,
    ModelKeys,
    DeviceKeys,
):
    """The megatron-core learner. ``etp``, ``dp`` and ``threads`` follow from the others when not given."""

    @property
    def dims(self) -> ParallelDims:
        """All degrees. etp defaults to tp without expert parallelism, else 1; dp to the least that fits ep*etp."""
        etp = self.etp or (self.tp if self.ep == 1 else 1)
        experts = self.ep * etp
        dp = self.dp or experts // math.gcd(experts, self.tp * self.cp)
        return ParallelDims(tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=etp, cp=self.cp, dp=dp)


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
