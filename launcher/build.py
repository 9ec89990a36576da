"""The composition root: a RunConfig -> a running Trainer. It chooses the launcher and makes the trainer's parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import resuming
from launcher.engines import ServedLauncher
from launcher.local import LocalLauncher
from launcher.own_thread import OwnThread
from launcher.run_name import claim
from launcher.seats import HERE, places
from launcher.slurm import Job, SlurmLauncher
from launcher.starting_model import starting_folder
from launcher.stop import Stop, stop_signals
from launcher.watchdog import LoopWatch
from rl_megatron.config.io import save_resolved
from rl_megatron.config.resume import fixed
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import causal_attention_cost
from rl_megatron.data.prompts import PromptStream, load_prompts
from rl_megatron.durable import remove_folder
from rl_megatron.errors import ConfigError, RLMegatronError, Stopped
from rl_megatron.interfaces import Launcher, RewardFunction, Roles
from rl_megatron.models.configs.fields import GenerationFields
from rl_megatron.models.json_files import read_json
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.log import run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.report import write_report
from rl_megatron.rollout.pairs import OfflinePairs
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.training.checkpoints import Checkpoint, CheckpointStore
from rl_megatron.training.stopping import unless_stopped
from rl_megatron.training.trainer import Trainer
from rl_megatron.training.update import Update
from rl_megatron.training.warm_start import WarmStart
from rl_megatron.types import Prompt
from rl_megatron.weights.layouts.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run needs beside processes and data; making it finds what is wrong before any process starts."""

    config: RunConfig
    folder: Path
    reward: RewardFunction
    job: Job | None  # None: no Slurm allocation is used


async def train(config: RunConfig, reward: RewardFunction, *, resume: bool) -> Path:
    """Run to the end (or to a signal, then with a checkpoint); the run's folder. Raises RLMegatronError."""
    assert config.run.name is not None
    folder = config.run.dir / config.run.name
    with claim(folder, resume=resume):
        parts = Parts(config=config, folder=folder, reward=reward, job=job_of(config, folder))
        start = resuming.find(config, folder) if resume else None
        save_resolved(config, folder / "config.yaml")
        progress = Progress(config.train.steps, config.log.progress, config.run.name, run_folder=folder)
        with run_log(folder, role="controller"), progress, stop_signals(progress) as stop:
            loop_watch = LoopWatch(config, folder / "stacks")
            goes_on = f"rl-megatron train --config {folder}/config.yaml --resume goes on"
            finished: bool | None = None  # not begun
            try:
                finished = await _train(parts, progress, stop, start)
            except Stopped as early:
                progress.note(f"{early}; nothing is lost, and {goes_on}")
            except (RLMegatronError, OSError) as error:
                logger.info("the run ends: %s", error, exc_info=isinstance(error, OSError))  # main shows it
                raise
            finally:
                loop_watch.stop()
            if finished is not None:
                progress.note(f"report: {write_report([folder], folder / 'report.html')}")
            if stop.comes_back and not finished and parts.job is not None:
                parts.job.ask_requeue()
            if finished is False:
                progress.note(f"stopped and saved; {goes_on}")
    return folder


async def _train(parts: Parts, progress: Progress, stop: Stop, start: Checkpoint | None) -> bool:
    """Whether every step is made. What has been trained is exported, but where the run comes back soon."""
    config = parts.config
    async with started(parts, progress, stop) as (roles, data, shape):
        with contextlib.closing(Recorder(parts.folder, config.log, progress)) as recorder:
            trainer = _trainer(parts, shape, roles, data, recorder, stop)
            if not await _begin(trainer, data, start):
                return False
            progress.phase("reinforcement")
            await trainer.run()
            finished = trainer.step >= config.train.steps
            if finished or not stop.comes_back:
                exported = parts.folder / f"hf_step_{trainer.step:06d}"
                remove_folder(exported)  # where a finished run is resumed
                await roles.weights.export(exported)
            return finished


@contextlib.asynccontextmanager
async def started(parts: Parts, progress: Progress, stop: Stop) -> AsyncIterator[tuple[Roles, Data, ModelShape]]:
    """Learner and engine, the data and the model's shape; the processes are gone at the end of the context.

    Raises Stopped where a stop is asked first.
    """
    async with contextlib.AsyncExitStack() as stack:
        yield await unless_stopped(stop, _start(stack, parts, progress, stop))


async def _start(
    stack: contextlib.AsyncExitStack, parts: Parts, progress: Progress, stop: Stop
) -> tuple[Roles, Data, ModelShape]:
    """What ends the processes is on ``stack``."""
    config, thread = parts.config, OwnThread("start")  # a stop does not wait for what it reads
    stack.callback(thread.close)
    progress.note("preparing the model")
    model_folder = await thread(starting_folder, config)
    shape = ModelShape.from_folder(model_folder, families=FAMILIES)
    count = config.learner.dims.world_size
    others = "".join(f", {count} {role} processes" for role in config.roles.separate)
    progress.note(f"starting {count} learner processes{others} and loading data")
    launcher = _launcher(parts, model_folder, shape, stop)
    starting = asyncio.create_task(stack.enter_async_context(launcher.start(config, progress.note)))
    try:
        data = await thread(_load, config, model_folder)
    except BaseException:  # what is wrong with the data is told before all processes are up
        starting.cancel()
        await asyncio.wait([starting])
        raise
    return await starting, data, shape


def job_of(config: RunConfig, folder: Path) -> Job | None:
    """The allocation to use. Raises ConfigError where there is none and must be one."""
    job = None if config.run.launcher == "local" else Job.this(folder, config.slurm, config.roles.separate)
    if config.run.launcher == "slurm" and job is None:
        raise ConfigError(
            "run.launcher=slurm, but this is no Slurm job; send one with rl-megatron submit, or set run.launcher=local"
        )
    return job


def _launcher(parts: Parts, model_folder: Path, shape: ModelShape, stop: Stop) -> Launcher:
    if parts.config.run.launcher == "ray":
        return _on_ray(parts, model_folder, shape, stop)
    launcher: Launcher = LocalLauncher(model_folder, parts.folder)
    if parts.job is not None:
        launcher = SlurmLauncher(model_folder, parts.folder, parts.job, stop.ask)
    if parts.config.rollout.served:
        found, host = places(parts.config, parts.job), parts.job.address() if parts.job else HERE
        launcher = ServedLauncher(launcher, model_folder, parts.folder, shape, found, host)
    return launcher


def _on_ray(parts: Parts, model_folder: Path, shape: ModelShape, stop: Stop) -> Launcher:
    try:
        from launcher.ray_cluster import InCluster, RayCluster
        from launcher.ray_ranks import RayLauncher
    except ModuleNotFoundError as error:
        raise ConfigError("run.launcher=ray: Ray is not installed; pip install 'rl-megatron[ray]'") from error
    cluster = RayCluster(parts.config, parts.job, parts.folder)
    launcher: Launcher = RayLauncher(cluster, model_folder, parts.folder, stop.ask)
    if parts.config.rollout.served:
        found = places(parts.config, parts.job, cluster.start_guard)
        launcher = ServedLauncher(launcher, model_folder, parts.folder, shape, found, cluster.host)
    return InCluster(cluster=cluster, inner=launcher)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The tokenizer, what ends a completion, and both splits."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]


def _load(config: RunConfig, model_folder: Path) -> Data:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads would take the learners' cores
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
    except Exception as error:  # its Rust part raises bare ones for torn files
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"{model_folder}: transformers cannot read its tokenizer: {said[0][:500]}") from error
    train, held_out = load_prompts(
        config.data,
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        on_long_prompt=config.rollout.on_long_prompt,
        seed=config.seed,
    )
    stop_token_ids = _stop_token_ids(model_folder, tokenizer)
    return Data(tokenizer=tokenizer, stop_token_ids=stop_token_ids, train=train, held_out=held_out)


def _stop_token_ids(model_folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What ends a completion: the generation config's ``eos_token_id`` (one or several), else the tokenizer's."""
    path = model_folder / "generation_config.json"
    given = read_json(path, GenerationFields).eos_token_id if path.is_file() else None
    ids = tokenizer.eos_token_id if given is None else given
    if ids is None:
        raise ConfigError(
            f"{model_folder}: neither generation_config.json nor the tokenizer names an end-of-sequence token"
        )
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _trainer(
    parts: Parts, shape: ModelShape, roles: Roles, data: Data, recorder: Recorder, stop: asyncio.Event
) -> Trainer:
    config = parts.config
    sampler = RolloutSampler(
        engine=roles.engine,
        reward_function=parts.reward,
        decode=partial(data.tokenizer.decode, skip_special_tokens=True),
        rollout=config.rollout,
        reward=config.reward,
        stop_token_ids=() if config.rollout.ignore_eos else data.stop_token_ids,
        seed=config.seed,
        greedy_baseline=config.algorithm.advantage_mean == "greedy",
        routes=config.algorithm.routing_replay == "r3",
    )
    pairs = OfflinePairs(
        tokenizer=data.tokenizer, eos=data.stop_token_ids[0], max_new_tokens=config.rollout.max_new_tokens
    )
    return Trainer(
        config=config,
        roles=roles,
        source=pairs if data.train[0].rejected else sampler,
        sampler=sampler,
        prompts=PromptStream(data.train, seed=config.seed),
        eval_prompts=data.held_out,
        update=Update(
            config=config,
            roles=roles,
            attention_cost=causal_attention_cost(
                linear_parameters=shape.active_parameters,
                attention_width=shape.num_layers * shape.num_heads * shape.head_dim,
            ),
        ),
        start_folder=parts.folder / "hf_start",
        checkpoints=CheckpointStore(parts.folder / "checkpoints", keep=config.checkpoint.keep, config=fixed(config)),
        recorder=recorder,
        stop=stop,
    )


async def _begin(trainer: Trainer, data: Data, start: Checkpoint | None) -> bool:
    """Continue from a checkpoint, or warm-start; False where the warm start was stopped.

    Killed before its first checkpoint, a run starts over.
    """
    progress, section = trainer.recorder.progress, trainer.config.warm_start
    prompts = PromptStream(data.train, seed=trainer.config.seed + 1)
    warm_start = WarmStart(trainer=trainer, prompts=prompts, tokenizer=data.tokenizer)
    done = None
    if start is None:
        trainer.recorder.truncate_after(-1)
    else:
        progress.note(f"resuming from {start.folder}")
        done = start.state.warm_start_step
        trainer.recorder.truncate_after(start.state.step, warm_start_step=done)
        if done is None:
            await unless_stopped(trainer.stop, trainer.restore(start))
            return True
        await unless_stopped(trainer.stop, warm_start.restore(start))
    if section.steps:
        progress.phase("warm start", total=section.steps)
    return await warm_start.run(done)
