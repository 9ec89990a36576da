"""What a push and a checkpoint cost against a step, in lines that ``plan`` and ``submit`` show. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.flops import training_flops
from rl_megatron.scaling.pushes import Push, push_cost
from rl_megatron.scaling.saves import Save, save_cost

TOO_MUCH = 0.1
"""The share of a step above which a push or its share of a checkpoint is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: stated by the user, or else the floor of a step whose completions all have full length."""

    seconds: float
    stated: bool

    def describe(self) -> str:
        """A line to show."""
        if self.stated:
            return f"a step: {self.seconds:,.0f} s (slurm.speeds.step_seconds)"
        return (
            f"a step: at least {self.seconds:,.1f} s if completions have full length, for training alone at the GPUs' "
            "peak; set slurm.speeds.step_seconds to a measured one"
        )

    def share(self, seconds: float) -> str:
        """The share of the step that ``seconds`` are, in words; of a floor it is the most that they can be."""
        share = seconds / self.seconds
        if self.stated:
            return f"{share:.1%}"
        return f"at most {share:.1%}" if share <= 1 else f"{share:.1f} times this floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A run's push, checkpoint and step; ``step`` is None where nothing is known of it, as on CPUs."""

    push: Push
    save: Save
    step: StepTime | None

    def lines(self) -> Iterator[str]:
        """Lines to show."""
        route = self.push.route
        yield f"a push of weights (weights.transport={route.transport}), through {route.describe()}:"
        yield from (f"  {hop.describe()}" for hop in self.push.hops)
        if not self.push.hops:
            yield "  its bytes and seconds are those of your own code"
        yield self.save.describe()
        if self.step is not None:
            push, saves = self.step.share(self.push.seconds), self.step.share(self.save.seconds_a_step)
            yield self.step.describe()
            yield f"  of it: a push {push}, checkpoints {saves}"
        yield "all speeds are assumed, none is measured (slurm.speeds)"

    def warnings(self) -> Iterator[str]:
        """What a user should change before the run."""
        if self.push.route.shared:
            yield (
                f"each push of weights goes through {self.push.route.file}: {self.push.seconds:,.1f} s at assumed "
                "speeds. Give servers nodes of their own (slurm.engines.nodes) and weights.transport=process_group, or "
                "keep learner and servers on one node (docs/weights.md)"
            )
        if self.step is None or not self.step.stated:
            return
        pushed = 0.0 if self.push.route.shared else self.push.seconds
        costs = {
            "a push of weights takes": (pushed, "choose a faster weights.transport (docs/weights.md)"),
            "checkpoints take": (self.save.seconds_a_step, "raise checkpoint.every"),
        }
        for what, (seconds, change) in costs.items():
            if (share := seconds / self.step.seconds) > TOO_MUCH:
                yield (
                    f"{what} {seconds:,.1f} s of a step's {self.step.seconds:,.0f}, {share:.0%}, at assumed speeds "
                    f"(slurm.speeds); {change}"
                )


def estimate(config: RunConfig, shape: ModelShape) -> Estimate:
    """The estimate of a run. Raises ConfigError if the layout or the servers do not fit."""
    return Estimate(push=push_cost(config, shape), save=save_cost(config, shape), step=_step(config, shape))


def _step(config: RunConfig, shape: ModelShape) -> StepTime | None:
    stated = config.slurm.speeds.step_seconds
    if stated is not None:
        return StepTime(seconds=stated, stated=True)
    if config.learner.device == "cpu":
        return None
    return StepTime(seconds=floor_seconds(config, shape), stated=False)


def floor_seconds(config: RunConfig, shape: ModelShape) -> float:
    """Seconds that no step on GPUs can beat if all completions have full length: training alone, at peak.

    Forward and backward at the peak (`flops`); recomputing and sampling are left out.
    """
    rollout, peak = config.rollout, config.slurm.speeds.tflops * 1e12
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    flops = training_flops(shape, [longest]) * config.completions_per_step * config.train.epochs
    return flops / (config.learner.dims.world_size * peak)
