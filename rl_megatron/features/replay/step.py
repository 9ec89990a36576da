"""Has the passes of an update replay what the learner's own pass over the old policy chose (r2)."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.feature import StepHooks
from rl_megatron.features.replay.feature import of_algorithm
from rl_megatron.interfaces import Roles
from rl_megatron.training.measures import Measured


def make_hooks(config: RunConfig, roles: Roles) -> Replayed | None:
    """None where nothing is replayed, or what the engine chose, which samples have already (r3)."""
    return Replayed() if of_algorithm(config.algorithm) == "r2" else None


class Replayed(StepHooks):
    """Routes of the policy at the start of a step, for those that train on it."""

    @override
    def scored(self, found: Measured) -> Measured:
        samples = found.samples
        return replace(found, samples=replace(samples, extra={**samples.extra, "routes": found.policy["routes"]}))
