"""What a step, a push and a checkpoint cost, in lines that ``plan`` and ``submit`` show. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB, ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import gpus_by_role
from rl_megatron.training.flops import training_flops
from tools.planner.constants import RANGE
from tools.planner.hardware import gpu_named
from tools.planner.memory import footprints
from tools.planner.pushes import Push, push_cost
from tools.planner.rl_step import RlStep, rl_step, unlike_run
from tools.planner.rollouts import lengths_of
from tools.planner.saves import Save, save_cost

_TOO_MUCH = 0.1
"""The share of a step above which a push is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A step that `rl_step` predicts for ``gpus`` of the kind ``gpu``, with completions of ``mean`` tokens.

    ``peak_seconds`` are what training takes at the peak of the learner's GPUs.
    """

    step: RlStep
    gpu: str
    gpus: int
    mean: float
    peak_seconds: float

    @property
    def mfu(self) -> float:
        """The share of the learner's peak that training uses."""
        return self.peak_seconds / self.step.parts["training"]

    def lines(self) -> Iterator[str]:
        """Lines to show below the step's seconds."""
        step, (low, high) = self.step, RANGE
        parts = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in step.parts.items())
        bubble = step.training.get("bubble", 0.0) / step.parts["training"]
        yield f"  {parts}{f'; sampling overlaps the rest (staleness {step.staleness})' if step.staleness else ''}"
        if step.least:
            older = ", which only makes data older" if step.staleness > step.least else ""
            yield (
                f"  the longest completion takes {step.sampled.longest:,.0f} s: train.max_staleness={step.least} is "
                f"the least with which no step waits for it, and takes {step.slower:,.1f} s; here it is "
                f"{step.staleness}{older}"
            )
        rate = step.tokens_a_second
        yield (
            f"  {rate:,.0f} tokens/s, {rate / self.gpus:,.0f} on each of {self.gpus} GPUs; "
            f"training at {self.mfu:.0%} of the peak (MFU), {bubble:.0%} of it the pipeline's bubble"
        )
        if step.sampled.held_back:
            yield (
                "  rollout.server.concurrency holds the servers back: raise it; "
                f"{step.sampled.requests:,} requests, each of a group, fill their places"
            )
        if step.server.drafts:
            yield (
                f"  a server's step with rollout.server.draft_tokens={step.server.drafts} gives "
                f"{1 + step.server.accepted:.2f} tokens of a row, by slurm.speeds.draft_acceptance (null: assumed)"
            )
        yield (
            f"  expect training at {low:g} to {high:g} times its rate, whole steps less surely (docs/scaling.md); "
            f"completions of {self.mean:,.0f} tokens in the mean are assumed (slurm.speeds.mean_tokens)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: stated by the user, else ``predicted``, else the floor of a step whose completions all have
    full length; ``why`` says why none are predicted."""

    seconds: float
    stated: bool
    predicted: Predicted | None = None
    why: str = ""

    def lines(self) -> Iterator[str]:
        """The estimate as lines of text, with units."""
        found = self.predicted
        if self.stated:
            yield f"a step: {self.seconds:,.0f} s (slurm.speeds.step_seconds)"
        elif found is None:
            yield (
                f"a step: at least {self.seconds:,.1f} s if completions have full length, for training alone at the "
                "GPUs' peak; set slurm.speeds.step_seconds to a measured one"
            )
        if found is not None:
            named = "predicted" if self.stated else "a step"
            yield f"{named}: {found.step.seconds:,.1f} s, predicted for slurm.speeds.gpu={found.gpu}:"
            yield from found.lines()
        elif self.why:
            yield f"  seconds by phase are not predicted: {self.why}"

    def share(self, seconds: float) -> str:
        """The share of the step that ``seconds`` are, in words; of a floor it is the most that they can be."""
        share = seconds / self.seconds
        if self.stated or self.predicted is not None:
            return f"{share:.1%}"
        return f"at most {share:.1%}" if share <= 1 else f"{share:.1f} times this floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A run's push, checkpoint and step; ``step`` is None where nothing is known of it, as on CPUs.

    ``signal_seconds`` are what a job leaves for a step and a checkpoint before its time is up.
    """

    push: Push
    save: Save
    step: StepTime | None
    signal_seconds: int
    pushes: bool = True  # whether steps push weights, and not the run's end alone, for its export

    def lines(self) -> Iterator[str]:
        """The estimate as lines of text, with units."""
        route = self.push.route
        what = "a push" if self.pushes else "the export"
        if self.push.before:
            yield f"{self.push.before / GB:,.1f} GB of frozen weights to each server, once before the first push"
        pushed = "adapters" if self.push.before else "weights"
        yield f"{what} of {pushed} by {route.transport}, through {route.describe()}:"
        yield from (f"  {hop.describe()}" for hop in self.push.hops)
        yield self.save.describe()
        yield self.save.describe_disk()
        if self.step is not None:
            seconds = self.push.seconds if self.pushes else 0.0
            yield from self.step.lines()
            yield f"  of it: a push {self.step.share(seconds)}"
        yield "all speeds are assumed, none is measured (slurm.speeds)"

    def warnings(self) -> Iterator[str]:
        """What a user should change before the run."""
        if self.push.route.shared and self.pushes:
            yield (
                f"each push of weights goes through {self.push.route.file}: {self.push.seconds:,.1f} s at assumed "
                "speeds. Give servers nodes of their own (slurm.engines.nodes) and weights.transport=direct, or "
                "keep learner and servers on one node (docs/weights.md)"
            )
        if self.step is None:
            return
        if self.step.seconds > self.signal_seconds:
            yield (
                f"a step takes {self.step.seconds:,.0f} s, more than slurm.signal_seconds={self.signal_seconds} leaves "
                "it and its checkpoint: a job whose time is up loses the step; set it longer"
            )
        if not self.step.stated or not self.pushes or self.push.route.shared:
            return
        if (share := self.push.seconds / self.step.seconds) > _TOO_MUCH:
            yield (
                f"a push of weights takes {self.push.seconds:,.1f} s of a step's {self.step.seconds:,.0f}, {share:.0%},"
                " at assumed speeds (slurm.speeds); choose a faster weights.transport (docs/weights.md)"
            )


def estimate(config: RunConfig, shape: ModelShape) -> Estimate:
    """The estimate of a run. Raises ConfigError if the layout or the servers do not fit."""
    push = push_cost(config, shape)
    saves, step = save_cost(config, shape), _step(config, shape, push)
    signal = config.slurm.signal_seconds
    return Estimate(push=push, save=saves, step=step, signal_seconds=signal, pushes=config.kind.samples)


def planned_metrics(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """Returns what the plan says of metrics of a run on GPUs, by their names; nothing of one on CPUs.

    memory/peak is of torch's allocator: without what engine servers on the same GPU, contexts and NCCL take. Seconds,
    mfu/train and the length that a completion is assumed to have are there if ``slurm.speeds.gpu`` names the GPUs.
    Raises ConfigError if the layout does not divide the model's sizes.
    """
    if config.learner.device == "cpu":
        return {}
    apart = {"reserved", "engine"} if config.rollout.served else {"reserved"}
    held = [
        sum(taken for term, taken in one.terms.items() if term not in apart)
        for one in footprints(config, shape)
        if one.role == LEARNER
    ]
    step = estimate(config, shape).step
    found = step.predicted if step is not None else None
    if found is None:
        return {"memory/peak": max(held)}
    names = {"training": "train", "log-probs": "logprobs", "rollout": "rollout", "push": "weights"}
    seconds = {f"seconds/{name}": found.step.parts[part] for part, name in names.items() if part in found.step.parts}
    return {"memory/peak": max(held), "mfu/train": found.mfu, "response/length_mean": found.mean, **seconds}


def _step(config: RunConfig, shape: ModelShape, push: Push) -> StepTime | None:
    stated = config.slurm.speeds.step_seconds
    if config.learner.device == "cpu":
        return None if stated is None else StepTime(seconds=stated, stated=True)
    why = _unpredicted(config)
    found = predicted(config, shape, push) if not why else None
    seconds = stated or (floor_seconds(config, shape) if found is None else found.step.seconds)
    return StepTime(seconds=seconds, stated=stated is not None, predicted=found, why=why)


def _unpredicted(config: RunConfig) -> str:
    """Why a step's seconds are not predicted; empty if they are."""
    server = config.rollout.server
    if config.slurm.speeds.gpu is None:
        return "set slurm.speeds.gpu to the kind of your GPUs, as h100"
    if not config.kind.samples:
        return f"they are of steps that sample, and job={config.job} samples nothing"
    for why in unlike_run(config):
        return f"they are of {why}"
    if not config.rollout.served:
        return f"they are of servers that sample, and rollout.engine={config.rollout.engine}"
    if server.addresses is not None:
        return "the GPUs of servers at rollout.server.addresses are not known"
    return f"they are of servers of one stage, and rollout.server.pp={server.pp}" if server.pp > 1 else ""


def predicted(config: RunConfig, shape: ModelShape, push: Push) -> Predicted:
    """The step that is predicted of a configuration with ``slurm.speeds.gpu``; a push takes the seconds of its plan.

    Raises ConfigError if no GPU is called so, or completions are longer in the mean than any may be.
    """
    speeds, rollout, kind = config.slurm.speeds, config.rollout, str(config.slurm.speeds.gpu)
    mean = speeds.mean_tokens or rollout.max_new_tokens / 2
    if mean > rollout.max_new_tokens:
        raise ConfigError(
            f"slurm.speeds.mean_tokens={mean:g} is more than rollout.max_new_tokens={rollout.max_new_tokens}; lower "
            "the first, or leave it out for half of the second"
        )
    gpu, prompt = gpu_named(kind, "slurm.speeds.gpu"), rollout.max_prompt_tokens / 2
    each = training_flops(shape, [round(prompt + mean)], config.learner)
    flops = each * config.trained_per_step * config.train.epochs
    return Predicted(
        step=rl_step(
            config,
            shape,
            gpu,
            lengths_of(mean, rollout.max_new_tokens),
            prompt=prompt,
            staleness=config.train.max_staleness,
            push=push.seconds,
        ),
        gpu=kind,
        gpus=sum(gpus_by_role(config).values()),
        mean=mean,
        peak_seconds=flops / (config.learner.dims.world_size * gpu.peak.bfloat16 * 1e12),
    )


def floor_seconds(config: RunConfig, shape: ModelShape) -> float:
    """Seconds that no step on GPUs can beat if all completions have full length: training alone, at peak.

    Forward and backward at the peak (`flops`); recomputing and sampling are left out.
    """
    peak = config.slurm.speeds.tflops * 1e12
    each = training_flops(shape, [config.longest_sequence], config.learner)
    return each * config.trained_per_step * config.train.epochs / (config.learner.dims.world_size * peak)
