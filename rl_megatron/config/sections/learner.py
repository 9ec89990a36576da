"""The ``learner`` section: the keys of the learner's options and of features, and its own; ``roles``: models with their
own ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rl_megatron.feature import with_features
from rl_megatron.options.batch_invariant import BatchInvariantKeys
from rl_megatron.options.cuda_graphs import CudaGraphKeys
from rl_megatron.options.deterministic import DeterministicKeys
from rl_megatron.options.device import DeviceKeys
from rl_megatron.options.dispatcher import DispatcherKeys
from rl_megatron.options.dtype import DtypeKeys
from rl_megatron.options.experts import ExpertKeys
from rl_megatron.options.fp8 import Fp8Keys
from rl_megatron.options.fusion import FusionKeys
from rl_megatron.options.gradients import GradientKeys
from rl_megatron.options.head import HeadKeys
from rl_megatron.options.layers import LayersKeys
from rl_megatron.options.lora import LoraKeys
from rl_megatron.options.offload import OffloadKeys
from rl_megatron.options.optimizer import OptimizerKeys
from rl_megatron.options.overlap import OverlapKeys
from rl_megatron.options.padding import PaddingKeys
from rl_megatron.options.pipeline import PipelineKeys
from rl_megatron.options.recompute import RecomputeKeys
from rl_megatron.options.replicas import ReplicaKeys
from rl_megatron.options.routers import RouterKeys
from rl_megatron.options.tensor import TensorKeys
from rl_megatron.section import OwnCode, Positive, PositiveFloat, Section
from rl_megatron.types import ParallelDims


class ModelKeys(Section):
    """The key that says how to read the model's config.json."""

    model: OwnCode | None = None
    """A Family of your own, as ``package.module:name`` in an installed package, which reads the config.json of
    ``model.path`` (docs/weights.md). Its code is run. null: the family that config.json names."""


class WorkKeys(Section):
    """The keys of one process's work: its threads and its micro-batches."""

    threads: Positive | None = None
    """CPU threads of each process; null: an equal share of the machine's cores."""
    max_tokens_per_micro_batch: Positive = 8192
    """Positions of a packed micro-batch on one data-parallel rank."""


class WorldKeys(Section):
    """The key of the process group."""

    timeout_seconds: PositiveFloat = 600.0
    """Time limit for all ranks to join a collective."""


@with_features("learner")
class LearnerSection(  # pydantic takes the keys of the last base first
    LoraKeys,
    CudaGraphKeys,
    BatchInvariantKeys,
    DeterministicKeys,
    OffloadKeys,
    OverlapKeys,
    PaddingKeys,
    FusionKeys,
    OptimizerKeys,
    RouterKeys,
    WorldKeys,
    RecomputeKeys,
    HeadKeys,
    WorkKeys,
    ReplicaKeys,
    DispatcherKeys,
    ExpertKeys,
    PipelineKeys,
    TensorKeys,
    LayersKeys,
    GradientKeys,
    Fp8Keys,
    DtypeKeys,
    ModelKeys,
    DeviceKeys,
):
    """The megatron-core learner. ``etp``, ``dp`` and ``threads`` default to values that follow from the other keys."""

    @property
    def dims(self) -> ParallelDims:
        """All degrees. etp defaults to tp if ep=1, else to 1; dp to the least for which ep*etp divides tp*cp*dp."""
        etp = self.etp or (self.tp if self.ep == 1 else 1)
        experts = self.ep * etp
        dp = self.dp or experts // math.gcd(experts, self.tp * self.cp)
        return ParallelDims(tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=etp, cp=self.cp, dp=dp)


class RoleLayoutSection(ReplicaKeys, ExpertKeys, PipelineKeys, TensorKeys):
    """The layout of the ranks of a separate ``critic`` or ``reference``, or of a teacher or a reward model that ranks
    hold (``teacher_<name>``, ``reward_<name>``), in place of the learner's. A key that is not given has the default of
    ``learner``, not its value."""


SeparateRole = Annotated[str, Field(pattern=r"^(critic|reference|(teacher|reward)_[a-z][a-z0-9_]*)$")]


class RolesSection(Section):
    """Which ranks hold the critic and the reference, and in what layout. In the learner's layout the results are equal
    to the bit either way."""

    critic: Literal["learner", "separate"] = "learner"
    """learner: each learner rank also holds a shard of the critic; separate: the critic has ranks of its own, which
    compute at the same time: as many as the learner, in its layout, unless ``roles.layouts.critic`` is another."""
    reference: Literal["learner", "separate"] = "learner"
    """As ``roles.critic``, for the reference."""
    layouts: Mapping[SeparateRole, RoleLayoutSection] = Field(default_factory=dict)

    @property
    def separate(self) -> tuple[str, ...]:
        """The roles with ranks of their own, in the order of a job's nodes."""
        return tuple(role for role in ("critic", "reference") if getattr(self, role) == "separate")
