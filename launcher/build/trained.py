"""Finds a trained model to evaluate: a Hugging Face folder, a run, or a checkpoint of one. Starts a configuration's
engine on this machine with its weights, without a learner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from launcher.build.model import starting_folder
from launcher.hosts.sites import standalone_sites
from launcher.processes.scratch import remove_at_exit
from launcher.runs.folder import drawn_mirror_path
from launcher.servers.engines import load_adapter
from launcher.servers.pool import ServerPool
from launcher.worker.learner_rank import make_mirror
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.jobs import CHECKPOINT, DpoSection, SftSection
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.local.engine import InProcessEngine, LocalEngine, make_decoder
from rl_megatron.errors import ConfigError, download_hint
from rl_megatron.feature import exported, make_encoding
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.models.shape import ModelShape
from rl_megatron.training import checkpoints
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checkpoints.convert import megatron_to_hf
from rl_megatron.weights.checkpoints.megatron import is_megatron
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, checksums, read_boxes
from rl_megatron.weights.checks.compare import ServerComparisons
from rl_megatron.weights.checks.reports import NO_KINDS, ChecksumReport
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import float32_in_files
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.delivery import FileDelivery, LearnerWeights

_DEFAULT = "tiny_cpu"
_NAMES_MODEL = ("model.path=", "model.tiny.", "learner.model=")
_VARIABLES = "model.template_variables."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """``source`` is a Hugging Face folder, or the learner's shards of a checkpoint; ``run`` made these."""

    config: RunConfig
    run: RunConfig
    source: Path
    out: Path  # the folder for results about it
    name: str


def trained_model(model: Path, config: str | None, overrides: Sequence[str]) -> TrainedModel:
    """Returns the target of a Hugging Face folder, a run's folder (its newest checkpoint) or one of its checkpoints.

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
        of_run = _load_run_config(own)
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
        given = f"give a Hugging Face folder, a run's folder or checkpoints/step_N{download_hint(model)}"
        raise ConfigError(f"{model}: no such folder; {given}")
    shards, around = is_megatron(model), model.resolve().parent
    if _is_run(around):
        own = str(around / "config.yaml")
        of_run = _load_run_config(own)
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


def _load_run_config(file: str) -> RunConfig:
    """Returns the configuration that a run wrote. Raises ConfigError that names the file."""
    try:
        return load_config(file, [])
    except ConfigError as error:
        raise ConfigError(
            f"{file}, by which the run trained the model, cannot be read here: {error}; if another version of "
            "rl_megatron wrote it, use that version, or change these keys in a copy of the run's folder"
        ) from error


def _with_model_of(run: RunConfig, loaded: RunConfig, source: Path, overrides: Sequence[str]) -> RunConfig:
    """Returns ``loaded`` with the model that ``run`` trained, in its dtype unless an override has another.

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
    """Returns the variables with which ``run`` applied its chat template, changed by overrides."""
    given = {item.partition("=")[0].removeprefix(_VARIABLES) for item in overrides if item.startswith(_VARIABLES)}
    own = {name: value for name, value in loaded.model.template_variables.items() if name in given}
    return {**run.model.template_variables, **own}


def _changed(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with other values in its sections; no learner starts, whose rules they might break."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    )


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()


def _sampling(config: RunConfig) -> RunConfig:
    """Returns the configuration with sampling: a job that samples nothing gets the defaults of one that does. Raises
    ConfigError for a model that has no log-probs."""
    if config.kind.scores:
        raise ConfigError(
            f"job={config.job}: its model scores texts and samples none; it serves as reward.function=hf:FOLDER, and "
            "its held-out figures are in metrics.jsonl"
        )
    if config.kind.samples:
        return config
    of_dpo = {"kl": config.algorithm.kl.model_copy(update={"reference": None})}
    sections = {"sft": SftSection(), "dpo": DpoSection(), "algorithm": config.algorithm.model_copy(update=of_dpo)}
    return config.model_copy(update={"job": "rl", **sections})


def hugging_face(target: TrainedModel, spare: Path) -> Path:
    """Returns the Hugging Face folder of the target, converted into ``spare`` if it is not one."""
    if not is_megatron(target.source):
        return target.source
    out, of_run = spare / target.name, not (target.source / "config.json").is_file()
    known = starting_folder(target.run) if of_run else None
    learner = target.config.learner
    if not exported(target.source, known or target.source, out, family=learner.model, dtype=learner.dtype):
        megatron_to_hf(target.source, out, config=known, family=learner.model)
    return out


def format_variables(config: RunConfig) -> str:
    """Returns the text of the chat template's variables, to print after the model; empty without any."""
    named = [f"{name}={json.dumps(value)}" for name, value in config.model.template_variables.items()]
    return f"; variables of its chat template: {', '.join(named)}" if named else ""


def config_for_folder(config: RunConfig, folder: Path) -> RunConfig:
    """Returns the configuration with that folder's model. Servers keep their memory: no learner takes turns."""
    server = config.rollout.server.model_copy(update={"colocated": False})
    return _changed(config, model={"path": folder}, rollout={"server": server})


_VERSION = 0


@contextlib.asynccontextmanager
async def standalone_engine(
    config: RunConfig, model_folder: Path, shape: ModelShape, folder: Path
) -> AsyncIterator[RolloutEngine]:
    """Yields the engine of ``rollout``, with the weights of ``model_folder`` in learner.dtype. Logs go to ``folder``.

    Raises ConfigError, EngineError or WeightError if it cannot start, CorruptionError if servers hold other weights.
    """
    section = config.rollout
    if not section.served:
        longest = section.max_prompt_tokens + config.longest_completion
        dtype = getattr(torch, config.learner.dtype)
        engine = LocalEngine(shape, slots=section.slots, dtype=dtype, device=config.learner.device, max_length=longest)
        engine.decode = make_decoder(model_folder) if section.stop else None
        hf = hf_layout(shape)
        await asyncio.to_thread(read_boxes, HFFolder(model_folder), hf, hf, 0, engine.tensors)
        yield InProcessEngine(engine)
        return
    path = drawn_mirror_path(config, folder)
    sites = standalone_sites(config)
    servers = ServerPool(config, load_adapter(section.engine, shape), model_folder, folder, shape, sites)
    with contextlib.ExitStack() as ends:
        ends.enter_context(remove_at_exit(path.parent))
        async with servers.running(path) as served:
            loading = _Loading(_FolderWeights(config, model_folder, shape, path, ends), path, served)
            servers.refit = loading.refit
            await loading.all()
            yield served


class _FolderWeights(LearnerWeights):
    """The learner's end of a delivery of a folder's weights."""

    def __init__(
        self, config: RunConfig, model_folder: Path, shape: ModelShape, path: Path, ends: contextlib.ExitStack
    ) -> None:
        """``ends`` is closed when the file is no longer used."""
        self._folder, self._path, self._ends = model_folder, path, ends
        self._hf, self._dtype = hf_layout(shape), getattr(torch, config.learner.dtype)
        self._encoding = make_encoding(config)
        self._mirror: mirror.Mirror | None = None

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Writes the mirror file."""
        await asyncio.to_thread(self._write, version)
        return WeightUpdate(version=version, num_bytes=0, seconds=0.0)

    @override
    async def sums(self) -> Sequence[ChecksumReport]:
        """Returns checksums of the folder's tensors after the cast, not after arrival; of quantized ones the file's."""
        return [await asyncio.to_thread(self._sums)]

    def _write(self, version: int) -> None:
        shapes, float32 = self._hf.local_shapes(0), float32_in_files(self._hf)
        make_mirror(self._path, shapes, self._dtype, self._folder, self._encoding, self._ends, float32=float32)
        self._mirror = mirror.Mirror(self._path, shapes, self._dtype, self._encoding, float32=float32)
        self._mirror.withdraw()
        read_boxes(HFFolder(self._folder), self._hf, self._hf, 0, self._mirror.tensors)
        self._mirror.serve(version)

    def _sums(self) -> ChecksumReport:
        assert self._mirror is not None
        if self._encoding is not None:
            return self._mirror.sums()
        shapes = self._hf.local_shapes(0)
        found = checksums(HFFolder(self._folder), shapes, mirror.dtypes(self._path))
        return ChecksumReport(rows=[("", name, whole_box(shapes[name]), found[name]) for name in shapes], seconds=0.0)


class _Loading:
    """Makes servers load the mirror file at ``path``, and compares the weights of their ranks with its seal."""

    def __init__(self, weights: _FolderWeights, path: Path, engine: ServerEngine) -> None:
        self._delivery = FileDelivery(learner=weights, path=path, servers=engine.weights)
        self._path, self._engine = path, engine
        self._lock, self._served, self._checks = asyncio.Lock(), False, ServerComparisons()

    async def all(self) -> None:
        """Serves the weights on all servers."""
        async with self._lock, self._delivery.sending(_VERSION) as deliver:
            delivered = await deliver(private=NO_KINDS, meanwhile=lambda: None)
            self._compare(delivered.reports, delivered.seal.checksums)
            await self._engine.weights.commit(_VERSION)
            self._served = True

    async def refit(self, name: str) -> None:
        """Serves them on a restarted server. Does nothing before `all`, when all servers are stale too."""
        async with self._lock:
            if self._served and self._engine.weights.stale(name):
                sealed = await self._delivery.filled(_VERSION)
                self._compare({name: await self._delivery.load(_VERSION, name)}, sealed.checksums)
                await self._engine.weights.commit(_VERSION, only=name)

    def _compare(self, reports: Mapping[str, Sequence[ChecksumReport]], sealed: Mapping[str, int]) -> None:
        for name, said in reports.items():
            self._checks.find(name, sealed, mirror.shapes(self._path), said).verified(name, "of the folder")
