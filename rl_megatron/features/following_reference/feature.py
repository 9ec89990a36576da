"""``algorithm.kl.reference_update_rate``: a reference that takes a share of the policy's weights every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from rl_megatron.feature import Feature, StepHooks
from rl_megatron.rules import Excludes, On, ReadIf, read_with_reference
from rl_megatron.section import Positive, PositiveFraction, Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.algorithm import KLSection
    from rl_megatron.interfaces import Learner, RunComponents
    from rl_megatron.observability.recorder import Stopwatch


class FollowKeys(Section):
    """The feature's keys of the KL."""

    reference_update_rate: PositiveFraction | None = None
    """The reference follows the policy: after each ``reference_update_every`` steps this share of its weights is the
    policy's, so that it is a moving average; 1 puts the policy in its place. null: it is frozen."""
    reference_update_every: Positive = 1
    """Steps from one to the next."""


def follow_section(kl: KLSection) -> FollowKeys:
    """Returns the feature's keys of the KL's section."""
    assert isinstance(kl, FollowKeys)
    return kl


_FOLLOWS = On("algorithm.kl.reference_update_rate")

FEATURE = Feature(
    name="following_reference",
    keys={"algorithm.kl": FollowKeys},
    moves_reference=lambda config: follow_section(config.algorithm.kl).reference_update_rate is not None,
    rules=(
        Excludes(one=_FOLLOWS, other=(On("roles.reference", "separate"), On("kind.samples", True, "job"),
                 On("needs_reference", True, "job")),
                 why="a reference that follows the policy takes its weights from the same ranks",
                 fix="set roles.reference=learner, or leave reference_update_rate out"),
        read_with_reference(*(f"algorithm.kl.{key}" for key in FollowKeys.model_fields)),
        ReadIf(keys=("algorithm.kl.reference_update_every",), any_of=(_FOLLOWS,),
               why="the reference is frozen"),
    ),
    step="rl_megatron.features.following_reference.feature:make_hooks",
)  # fmt: skip


def make_hooks(config: RunConfig, roles: RunComponents) -> Following | None:
    """Returns the hooks that move the reference; None for a run with a frozen reference."""
    kl = follow_section(config.algorithm.kl)
    if not config.reference_moves or kl.reference_update_rate is None:
        return None
    return Following(policy=roles.policy, rate=kl.reference_update_rate, every=kl.reference_update_every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Following(StepHooks):
    """Every ``every`` steps the reference takes the share ``rate`` of the policy's weights."""

    policy: Learner
    rate: float
    every: int

    @override
    async def stepped(self, step: int, watch: Stopwatch) -> None:
        if step % self.every == 0:
            with watch("reference"):
                await self.policy.update_reference(self.rate)
