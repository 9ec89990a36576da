"""Finds a trained model to evaluate or serve: a Hugging Face folder, a run, or a checkpoint of one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.build.model import starting_folder
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources
from rl_megatron.config.sections.jobs import DpoSection, SftSection
from rl_megatron.errors import ConfigError
from rl_megatron.training import checkpoints
from rl_megatron.weights.adapters.files import held_lora
from rl_megatron.weights.adapters.merging import merge_adapters
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints.convert import megatron_to_hf
from rl_megatron.weights.checkpoints.kind import is_megatron

_STEP = re.compile(r"(step|warm_start)_\d{6,}")
_DEFAULT = "tiny_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """``source`` is a Hugging Face folder, or the learner's shards of a checkpoint."""

    config: RunConfig
    source: Path
    out: Path  # the folder for what is written about it
    name: str


def trained_model(model: Path, config: str | None, overrides: Sequence[str]) -> TrainedModel:
    """The target of a Hugging Face folder, a run's folder (its newest checkpoint) or one of its checkpoints.

    ``config``: by default the run's, also of a folder in the run's own.

    Raises ConfigError, and CheckpointError that names torn files.
    """
    run = model.parent.parent if _STEP.fullmatch(model.name) else model
    if _is_run(run):
        checkpoint = checkpoints.latest(run / "checkpoints") if model == run else model
        if checkpoint is None:
            raise ConfigError(f"{run}: no checkpoint is complete; train on, or give a Hugging Face folder")
        loaded = _sampling(load_config(config or str(run / "config.yaml"), overrides))
        source = checkpoints.read(checkpoint).folder / "learner"
        return TrainedModel(config=loaded, source=source, out=run / "eval", name=checkpoint.name)
    if not model.is_dir():
        raise ConfigError(f"{model}: no such folder; give a Hugging Face folder, a run's folder or checkpoints/step_N")
    is_megatron(model)  # raises for neither kind
    around = model.resolve().parent
    loaded = _sampling(load_config(config or (str(around / "config.yaml") if _is_run(around) else _DEFAULT), overrides))
    return TrainedModel(config=loaded, source=model, out=Path("eval"), name=model.resolve().name)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()


def _sampling(config: RunConfig) -> RunConfig:
    """Of a job that samples nothing the one that does, with its defaults of sampling. Raises ConfigError for data that
    has no problems, and for a model that has no log-probs."""
    if config.kind.scores:
        raise ConfigError(
            f"job={config.job}: its model scores texts and samples none; it serves as reward.function=hf:FOLDER, and "
            "its held-out figures are in metrics.jsonl"
        )
    for key, data in data_sources(config.data).items():
        if isinstance(data, FileKeys) and data.messages_field is not None:
            raise ConfigError(
                f"{key}.messages_field={data.messages_field!r}: conversations have no answers to compare samples with; "
                "give a configuration whose data has problems, as --config gsm8k_tiny data.eval=FILE"
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
    known = starting_folder(target.config) if of_run else None
    if held_lora(target.source) is not None:
        family, dtype = target.config.learner.model, DType(target.config.learner.dtype)
        merge_adapters(target.source, known or target.source, out, family=family, dtype=dtype)
        return out
    megatron_to_hf(target.source, out, config=known, family=target.config.learner.model)
    return out


def of_folder(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with that folder's model, and servers that keep their memory: no learner takes turns."""
    server = config.rollout.server.model_copy(update={"colocated": False})
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": folder}),
            "rollout": config.rollout.model_copy(update={"server": server}),
        }
    )
