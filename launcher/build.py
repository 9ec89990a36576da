"""The composition root: a RunConfig -> a running Trainer. The only file that names concrete classes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.local import LocalLauncher
from rl_megatron import checkpoints, config_io
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.config import AlgorithmSection, RunConfig
from rl_megatron.data.packing import causal_attention_cost
from rl_megatron.data.prompts import PromptStream, load_prompts
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.interfaces import Launcher, RewardFunction, Roles
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.observability.log import run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.report import write_report
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.trainer import Trainer
from rl_megatron.types import Loss, Prompt
from rl_megatron.warm_start import WarmStart
from rl_megatron.weights.layout import Layout
from rl_megatron.weights.tables.qwen3_moe import MEGATRON_QWEN3_MOE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESUME_MAY_CHANGE = ("run", "train", "eval", "checkpoint", "log", "learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run needs beside processes and data; making it finds what is wrong before any process starts."""

    config: RunConfig
    folder: Path
    policy_loss: Loss
    reward: RewardFunction


async def train(config: RunConfig, *, resume: bool) -> Path:
    """Run to the end (or to a signal, then with a checkpoint); the run's folder. Raises RLMegatronError."""
    assert config.run.name is not None
    folder = config.run.dir / config.run.name
    parts = Parts(
        config=config,
        folder=folder,
        policy_loss=_policy_loss(config.algorithm),
        reward=resolve_reward(config.reward.function),
    )
    if resume:
        _check_same(config, config_io.load(str(folder / "config.yaml"), []))
    folder.mkdir(parents=True, exist_ok=True)
    config_io.save_resolved(config, folder / "config.yaml")
    progress = Progress(config.train.steps, config.log.progress, config.run.name, run_folder=folder)
    with run_log(folder, role="controller"), progress, _stop_signals(progress) as stop:
        await _train(parts, progress, stop, resume=resume)
        progress.note(f"report: {write_report([folder], folder / 'report.html')}")
    return folder


async def _train(parts: Parts, progress: Progress, stop: asyncio.Event, *, resume: bool) -> None:
    config = parts.config
    progress.note("preparing the model")
    model_folder = await asyncio.to_thread(_model_folder, config)
    shape = ModelShape.from_folder(model_folder)
    Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=config.learner.dims)  # raises for degrees that do not divide
    progress.note(f"starting {config.learner.dims.world_size} learner processes and loading data")
    launcher: Launcher = LocalLauncher(model_folder, parts.folder)
    loading = asyncio.create_task(asyncio.to_thread(_load, config, model_folder))
    async with launcher.start(config) as roles:
        data = await loading
        with contextlib.closing(Recorder(parts.folder, config.log, progress)) as recorder:
            trainer = _trainer(parts, shape, roles, data, recorder, stop)
            await _begin(trainer, data, resume=resume)
            progress.phase("reinforcement")
            await trainer.run()
            await roles.weights.export(parts.folder / f"hf_step_{trainer.step:06d}")


def _model_folder(config: RunConfig) -> Path:
    if config.model.path is not None:
        return config.model.path
    return make_tiny_model(config.model.tiny, config.model.cache_dir, config.seed)


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

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
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
    given = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ids = tokenizer.eos_token_id if given is None else given
    if ids is None:
        raise ConfigError(
            f"{model_folder}: neither generation_config.json nor the tokenizer names an end-of-sequence token"
        )
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _policy_loss(a: AlgorithmSection) -> Loss:
    try:
        return PolicyLoss(
            ratio_level=a.ratio_level,
            objective=a.objective,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            cap_low=a.cap_low,
            cap_high=a.cap_high,
            aggregation=a.aggregation,
        )
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from error


def _trainer(
    parts: Parts, shape: ModelShape, roles: Roles, data: Data, recorder: Recorder, stop: asyncio.Event
) -> Trainer:
    config = parts.config
    return Trainer(
        config=config,
        roles=roles,
        sampler=RolloutSampler(
            engine=roles.engine,
            reward_function=parts.reward,
            decode=partial(data.tokenizer.decode, skip_special_tokens=True),
            rollout=config.rollout,
            reward=config.reward,
            stop_token_ids=() if config.rollout.ignore_eos else data.stop_token_ids,
            seed=config.seed,
        ),
        prompts=PromptStream(data.train, seed=config.seed),
        eval_prompts=data.held_out,
        policy_loss=parts.policy_loss,
        attention_cost=causal_attention_cost(
            linear_parameters=shape.active_parameters,
            attention_width=shape.num_layers * shape.num_heads * shape.head_dim,
        ),
        checkpoints=checkpoints.CheckpointStore(parts.folder / "checkpoints", keep=config.checkpoint.keep),
        recorder=recorder,
        stop=stop,
    )


async def _begin(trainer: Trainer, data: Data, *, resume: bool) -> None:
    """Continue from the last checkpoint, or warm-start. Killed before the first checkpoint, a run starts over."""
    progress = trainer.recorder.progress
    latest = trainer.checkpoints.latest() if resume else None
    trainer.recorder.truncate_after(checkpoints.step_of(latest) if latest else -1)
    if latest is not None:
        progress.note(f"resuming from {latest}")
        await trainer.restore(checkpoints.read(latest), latest)
        return
    if trainer.config.warm_start.steps:
        progress.phase("warm start", total=trainer.config.warm_start.steps)
    prompts = PromptStream(data.train, seed=trainer.config.seed + 1)
    await WarmStart(trainer=trainer, prompts=prompts, tokenizer=data.tokenizer).run()


def _check_same(config: RunConfig, before: RunConfig) -> None:
    """A resume may change lengths, logging and the layout; anything else would be another run under the same name."""
    now, then = config.model_dump(mode="json"), before.model_dump(mode="json")
    changed = [
        f"{section}: {then[section]} then, {now[section]} now"
        for section in now
        if section not in _RESUME_MAY_CHANGE and now[section] != then[section]
    ]
    if config.learner.dims.ep != before.learner.dims.ep:
        changed.append(
            f"learner.ep={before.learner.dims.ep} then, {config.learner.dims.ep} now: megatron-core 0.16.1 cannot "
            "reshard the optimizer's state over another expert-parallel degree"
        )
    if changed:
        raise CheckpointError("--resume with another configuration:\n" + "\n".join(changed))


@contextlib.contextmanager
def _stop_signals(progress: Progress) -> Iterator[asyncio.Event]:
    """Ctrl-C and SIGTERM ask for an end after the step in hand; a second Ctrl-C interrupts at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask(name: str) -> Callable[[], None]:
        def handle() -> None:
            progress.note(f"{name}: finishing this step and saving; press Ctrl-C again to stop at once")
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        return handle

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ask(signal.Signals(signum).name))
    try:
        yield stop
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
