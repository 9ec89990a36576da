"""How large a rehearsal's steps are, and how long its stages may take: as its run needs, by the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.estimates import StepTime, estimate

STEPS = 2
"""Steps before a rank is killed; one more follows the resume."""
FAR = 2.0
"""Times the prediction that seconds may take before the table says that they are worse."""
LEAST: Mapping[str, float] = {"survey": 180.0, "start": 600.0, "resume": 300.0}
"""Seconds that stages have at the least."""
_ENDING = 120.0  # seconds, of processes
_MINIBATCHES = 2


def batch_of(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Keys of a smaller batch, of two minibatches that fill every pipeline; none if the run's own is no larger.

    So a rank holds the activations of the run's steps, of sequences as long, after an optimizer step too.
    """
    rollout, learner, train = config.rollout, config.learner, config.train
    mean = (config.slurm.speeds.mean_tokens or rollout.max_new_tokens / 2) + rollout.max_prompt_tokens / 2
    on_each = learner.pp * learner.max_tokens_per_micro_batch
    minibatches = min(train.minibatches, _MINIBATCHES)
    prompts = minibatches * ceil(on_each * learner.dims.dp / (mean * rollout.group_size))
    if not config.kind.samples or prompts >= rollout.prompts_per_step:
        return {"rollout": {}, "train": {}}
    return {"rollout": {"prompts_per_step": prompts}, "train": {"minibatches": minibatches}}


def stage_limits(inside: RunConfig, shape: ModelShape) -> Mapping[str, float]:
    """Seconds that each stage of a rehearsal may take, of which ``inside`` is the run.

    Servers have all of rollout.server.start_seconds, and the evaluation before the first step counts as one. Raises
    ConfigError if the layout or the servers do not fit.
    """
    guess, rollout = estimate(inside, shape), inside.rollout
    starts = inside.kind.samples and rollout.served and rollout.server.addresses is None
    opened = rollout.server.start_seconds if starts else 0.0
    save = guess.save.seconds
    step = (0.0 if guess.step is None else _seconds(guess.step)) + save
    return {
        "survey": LEAST["survey"],
        "start": max(LEAST["start"], opened + FAR * (STEPS + 1) * step),
        "resume": max(LEAST["resume"], opened + FAR * (save + step)),
    }


def job_minutes(limits: Mapping[str, float]) -> int:
    """The time limit of a rehearsal's job."""
    return ceil((sum(limits.values()) + _ENDING) / 60)


def smaller(config: RunConfig, inside: RunConfig) -> Iterator[str]:
    """Yields what is smaller in the steps of the rehearsal of ``config`` than in its own, if anything is."""
    if (prompts := inside.rollout.prompts_per_step) < config.rollout.prompts_per_step:
        yield (
            f"a step has {prompts} of the run's {config.rollout.prompts_per_step} prompts, and "
            f"{inside.train.minibatches} of its {config.train.minibatches} minibatches, which fill each pipeline"
        )


def _seconds(step: StepTime) -> float:
    """Of a step whose completions were not begun before it; stated ones are of the run's batch."""
    if step.predicted is None:
        return step.seconds
    found = step.predicted.step
    return max(step.seconds, found.seconds + (found.sampled.longest if found.staleness else 0.0))
