"""Finds a trained model to evaluate: a Hugging Face folder, a run, or a checkpoint of one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.build.model import starting_folder
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.jobs import CHECKPOINT, DpoSection, SftSection
from rl_megatron.errors import ConfigError, of_the_hub
from rl_megatron.training import checkpoints
from rl_megatron.weights.adapters.merging import merge_adapters
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints.convert import megatron_to_hf
from rl_megatron.weights.checkpoints.megatron import held_lora, is_megatron

_DEFAULT = "tiny_cpu"
_NAMES_MODEL = ("model.path=", "model.tiny.", "learner.model=")
_VARIABLES = "model.template_variables."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """``source`` is a Hugging Face folder, or the learner's shards of a checkpoint; ``run`` made these."""

    config: RunConfig
    run: RunConfig
    source: Path
    out: Path  # the folder for what is written about it
    name: str


def trained_model(model: Path, config: str | None, overrides: Sequence[str]) -> TrainedModel:
    """The target of a Hugging Face folder, a run's folder (its newest checkpoint) or one of its checkpoints.

    ``config``: by default the run's, also of a folder in the run's own. A checkpoint's model is its run's in any case,
    and so are the chat template's variables of either, changed by ``overrides``.

    Raises ConfigError, and CheckpointError that names torn files.
    """
    if model.name == "learner" and CHECKPOINT.fullmatch(model.parent.name) and _is_run(model.parents[2]):
        model = model.parent
    run = model.parent.parent if CHECKPOINT.fullmatch(model.name) else model
    if _is_run(run):
        checkpoint = checkpoints.latest(run / "checkpoints") if model == run else model
        if checkpoint is None:
            raise ConfigError(f"{run}: no checkpoint is complete; train on, or give a Hugging Face folder")
        own = str(run / "config.yaml")
        of_run = _runs_own(own)
        loaded = _sampling(load_config(config or own, overrides))
        source = checkpoints.read(checkpoint).folder / "learner"
        return TrainedModel(
            config=_with_model_of(of_run, loaded, source, overrides),
            run=_changed(of_run, model={"cache_dir": loaded.model.cache_dir}),
            source=source,
            out=run / "eval",
            name=checkpoint.name,
        )
    if not model.is_dir():
        given = f"give a Hugging Face folder, a run's folder or checkpoints/step_N{of_the_hub(model)}"
        raise ConfigError(f"{model}: no such folder; {given}")
    shards, around = is_megatron(model), model.resolve().parent
    if _is_run(around):
        own = str(around / "config.yaml")
        of_run = _runs_own(own)
        loaded = _sampling(load_config(config or own, overrides))
        variables = _variables(of_run, loaded, overrides)
        loaded = _changed(loaded, model={"template_variables": variables})
        config = config or own
    else:
        loaded = _sampling(load_config(config or _DEFAULT, overrides))
    if shards and not (model / "config.json").is_file() and config is None and loaded.model.path is None:
        raise ConfigError(
            f"{model}: shards of no run's checkpoint, without config.json; give the model that they were trained from, "
            "as model.path=FOLDER or their run's configuration as --config"
        )
    return TrainedModel(config=loaded, run=loaded, source=model, out=Path("eval"), name=model.resolve().name)


def _runs_own(file: str) -> RunConfig:
    """The configuration that a run wrote. Raises ConfigError that names the file."""
    try:
        return load_config(file, [])
    except ConfigError as error:
        raise ConfigError(
            f"{file}, by which the run trained the model, cannot be read here: {error}; if another version of "
            "rl_megatron wrote it, use that version, or change these keys in a copy of the run's folder"
        ) from error


def _with_model_of(run: RunConfig, loaded: RunConfig, source: Path, overrides: Sequence[str]) -> RunConfig:
    """``loaded`` with the model that ``run`` trained, in its dtype unless an override has another.

    Raises ConfigError for an override that names another model.
    """
    variables = _variables(run, loaded, overrides)
    model = {"path": run.model.path, "tiny": run.model.tiny, "template_variables": variables}
    learner = {"model": run.learner.model}
    if not any(item.startswith("learner.dtype=") for item in overrides):
        learner["dtype"] = run.learner.dtype
    changed = _changed(loaded, model=model, learner=learner)
    named = [item for item in overrides if item.startswith(_NAMES_MODEL)]
    if named and (changed.model, changed.learner.model) != (loaded.model, loaded.learner.model):
        raise ConfigError(
            f"{', '.join(named)}: {source} is of a run from {run.model.path or 'a tiny model'}, and goes with that "
            "alone; leave it out, or evaluate what "
            f"rl-megatron convert {shlex.quote(str(source))} OUT --config MODEL writes"
        )
    return changed


def _variables(run: RunConfig, loaded: RunConfig, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The variables with which ``run`` applied its chat template, changed by overrides."""
    given = {item.partition("=")[0].removeprefix(_VARIABLES) for item in overrides if item.startswith(_VARIABLES)}
    own = {name: value for name, value in loaded.model.template_variables.items() if name in given}
    return {**run.model.template_variables, **own}


def _changed(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values in its sections; no learner starts, whose rules they might break."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    )


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()


def _sampling(config: RunConfig) -> RunConfig:
    """Of a job that samples nothing the one that does, with its defaults of sampling. Raises ConfigError for a model
    that has no log-probs."""
    if config.kind.scores:
        raise ConfigError(
            f"job={config.job}: its model scores texts and samples none; it serves as reward.function=hf:FOLDER, and "
            "its held-out figures are in metrics.jsonl"
        )
    return (
        config
        if config.kind.samples
        else config.model_copy(update={"job": "rl", "sft": SftSection(), "dpo": DpoSection()})
    )


def hugging_face(target: TrainedModel, spare: Path) -> Path:
    """The Hugging Face folder of the target, converted into ``spare`` where it is not one."""
    if not is_megatron(target.source):
        return target.source
    out, of_run = spare / target.name, not (target.source / "config.json").is_file()
    known = starting_folder(target.run) if of_run else None
    if held_lora(target.source) is not None:
        family, dtype = target.config.learner.model, DType(target.config.learner.dtype)
        merge_adapters(target.source, known or target.source, out, family=family, dtype=dtype)
        return out
    megatron_to_hf(target.source, out, config=known, family=target.config.learner.model)
    return out


def shown_variables(config: RunConfig) -> str:
    """The chat template's variables, to print after what is printed of the model; empty without any."""
    named = [f"{name}={json.dumps(value)}" for name, value in config.model.template_variables.items()]
    return f"; variables of its chat template: {', '.join(named)}" if named else ""


def of_folder(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with that folder's model, and servers that keep their memory: no learner takes turns."""
    server = config.rollout.server.model_copy(update={"colocated": False})
    return _changed(config, model={"path": folder}, rollout={"server": server})
