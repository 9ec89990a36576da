"""``algorithm.kl.follow_rate``: a reference model that takes a share of the policy's weights every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from rl_megatron.feature import Feature, StepHooks

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.interfaces import Learner, Roles
    from rl_megatron.observability.recorder import Stopwatch

FEATURE = Feature(
    name="following_reference",
    step="rl_megatron.features.following_reference.feature:make_hooks",
)  # fmt: skip


def make_hooks(config: RunConfig, roles: Roles) -> Following | None:
    """The reference's steps; None for a run whose reference does not follow."""
    from rl_megatron.config.beside import reference_follows  # whose sections import this

    kl = config.algorithm.kl
    if not reference_follows(config) or kl.follow_rate is None:
        return None
    return Following(policy=roles.policy, rate=kl.follow_rate, every=kl.follow_every)


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
                await self.policy.lead(self.rate)
