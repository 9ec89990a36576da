"""The configurations of a rehearsal: of its job, and of the run inside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from launcher.build.model import starting_shape
from launcher.rehearsal.sizes import LEAST, STEPS, batch_of, job_minutes, smaller, stage_limits
from rl_megatron.config.errors import explain_errors
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, MixtureData, OneSource
from rl_megatron.config.sections.eval import EvalSection
from rl_megatron.config.sections.jobs import WarmStartSection
from rl_megatron.config.sections.log import LogSection, ProfileSection
from rl_megatron.errors import CheckpointError, ConfigError, RLMegatronError
from rl_megatron.scaling.estimates import estimate
from rl_megatron.weights.checkpoints.kind import is_megatron
from rl_megatron.weights.formats.hf_folder import weight_files

SUFFIX = "-rehearsal"
_LAST = 100  # step of the run inside, which is ended before
_EVALUATED = 8  # prompts
_SIGNAL_SECONDS = 60


def rehearsal_of(config: RunConfig) -> RunConfig:
    """The rehearsal's job: a run of its own beside ``config``'s, which is never requeued.

    Raises ConfigError if the run inside it cannot be.
    """
    name = config.run.name
    never = {"requeues": 0, "restarts": 0, "exclude_slow": 0}
    slurm = {"signal_seconds": _SIGNAL_SECONDS, "array": None, **never}
    model = {"random_weights": not _has_weights(config)}
    job = _changed(
        config,
        run={"name": name if name is None or name.endswith(SUFFIX) else f"{name}{SUFFIX}"},
        slurm=slurm,
        model=model,
    )
    return _changed(job, slurm={"time": f"{_minutes(run_of(job))}"})


def run_of(config: RunConfig) -> RunConfig:
    """The run inside the rehearsal: its sizes, layout, lengths, servers and reward are the real ones; it makes a few
    steps from the start, of few prompts (`batch_of`), each with a checkpoint, and evaluates little."""
    data = config.data
    little = (
        {"sources": {name: {**dict(one), **_little(one)} for name, one in data.sources.items()}}
        if isinstance(data, MixtureData)
        else _little(data)
    )
    batch = batch_of(config)
    return _changed(
        config,
        data=little,
        rollout=batch["rollout"],
        train={"steps": _LAST, "lr_warmup_steps": 0, "lr_decay": "none"} | batch["train"],
        warm_start=WarmStartSection().model_dump(),
        eval=_eval(config.eval),
        checkpoint={"every": 1, "keep": 2, "keep_every": None, "keep_best": 0},
        profile=ProfileSection().model_dump(),
        log={"progress": "plain", "tensorboard": False, "wandb": "off", "wandb_project": LogSection().wandb_project},
        run={"slow_steps": STEPS, "slow_factor": config.run.slow_factor or 1.5},
    )


def _minutes(inside: RunConfig) -> int:
    try:
        return job_minutes(stage_limits(inside, starting_shape(inside)))
    except RLMegatronError:  # which preflight finds too, beside all others
        return job_minutes(LEAST)


def announced(job: RunConfig) -> Iterator[str]:
    """Yields what to say of a rehearsal before it has its nodes: its limits, and what they leave out."""
    inside, shape = run_of(job), starting_shape(job)
    stages = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in stage_limits(inside, shape).items())
    yield f"the rehearsal takes at most {job.slurm.time} minutes: {stages}"
    yield from smaller(job, inside)
    step = estimate(inside, shape).step
    if step is not None and step.predicted is None and not step.stated:
        yield f"its limits leave out seconds of sampling, which are not predicted: {step.why}"


def _little(source: OneSource) -> dict[str, int]:
    return {"max_eval": _EVALUATED} if isinstance(source, FileKeys) else {"num_eval": _EVALUATED}


def _eval(section: EvalSection) -> dict[str, Any]:
    """Before the first step a few problems of the first set are sampled; other sets are due at a step that never comes.
    Servers of evaluations start."""
    sets = {name: {**dict(one), "every": None, "at_steps": (_LAST,)} for name, one in section.sets.items()}
    for name in list(sets)[:1]:
        limit = min(section.sets[name].limit or _EVALUATED, _EVALUATED)
        sets[name] |= {"at_steps": (), "limit": limit, "samples": 1, "pass_at": ()}
    return {"every": 0 if section.mode == "blocking" else _LAST, "sets": sets}


def _has_weights(config: RunConfig) -> bool:
    """Whether the model is there whole: its own weights are loaded then, as in the run. A tiny model makes them."""
    folder = config.model.path
    if folder is None or is_megatron(folder):
        return True
    try:
        weight_files(folder)
    except CheckpointError:
        return False
    return True


def _changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The configuration with other values in its sections, checked again. Raises ConfigError."""
    values = config.model_dump()
    for section, changes in sections.items():
        values[section].update(changes)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(["its rehearsal cannot be:", *explain_errors(error.errors())])) from error
