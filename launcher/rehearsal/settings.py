"""The configurations of a rehearsal: of its job, and of the run inside it."""

from __future__ import annotations

from typing import Any

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, MixtureData, OneSource
from rl_megatron.config.sections.jobs import WarmStartSection
from rl_megatron.config.sections.log import LogSection
from rl_megatron.errors import CheckpointError
from rl_megatron.weights.checkpoints.kind import is_megatron
from rl_megatron.weights.formats.hf_folder import weight_files

SUFFIX = "-rehearsal"
MINUTES = 20
"""The time limit of a rehearsal's job."""
STEPS = 2
"""Steps before a rank is killed; one more follows the resume."""
_EVALUATED = 8  # prompts
_SIGNAL_SECONDS = 60


def rehearsal_of(config: RunConfig) -> RunConfig:
    """The rehearsal's job: a run of its own beside ``config``'s, which is never requeued."""
    name = config.run.name
    slurm = {"time": f"{MINUTES}", "signal_seconds": _SIGNAL_SECONDS, "requeues": 0, "restarts": 0, "array": None}
    model = {"random_weights": not _has_weights(config)}
    return _changed(
        config,
        run={"name": name if name is None or name.endswith(SUFFIX) else f"{name}{SUFFIX}"},
        slurm=slurm,
        model=model,
    )


def run_of(config: RunConfig) -> RunConfig:
    """The run inside the rehearsal: its sizes, layout, lengths, servers and reward are the real ones; it makes a few
    steps from the start, each with a checkpoint, and evaluates little."""
    data = config.data
    little = (
        {"sources": {name: {**dict(one), **_little(one)} for name, one in data.sources.items()}}
        if isinstance(data, MixtureData)
        else _little(data)
    )
    return _changed(
        config,
        data=little,
        train={"steps": 100, "lr_warmup_steps": 0, "lr_decay": "none"},  # it is ended before its last
        warm_start=WarmStartSection().model_dump(),
        eval={"every": 0},
        checkpoint={"every": 1, "keep": 2},
        log={"progress": "plain", "tensorboard": False, "wandb": "off", "wandb_project": LogSection().wandb_project},
        run={"slow_steps": STEPS, "slow_factor": config.run.slow_factor or 1.5},
    )


def _little(source: OneSource) -> dict[str, int]:
    return {"max_eval": _EVALUATED} if isinstance(source, FileKeys) else {"num_eval": _EVALUATED}


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
    """The configuration with other values in its sections, checked again."""
    values = config.model_dump()
    for section, changes in sections.items():
        values[section].update(changes)
    return RunConfig.model_validate(values)
