"""The composition root: a RunConfig -> a running Trainer. The only file that names concrete classes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.local import LocalLauncher
from rl_megatron import checkpoints, config_io
from rl_megatron.config import RunConfig
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces import Launcher, Roles
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.log import run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.weights.layout import Layout
from rl_megatron.weights.tables.qwen3_moe import MEGATRON_QWEN3_MOE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_megatron.trainer import Trainer
    from rl_megatron.types import Prompt

_RESUME_MAY_CHANGE = ("run", "train", "eval", "checkpoint", "log", "learner")


async def train(config: RunConfig, *, resume: bool) -> Path:
    """Run to the end (or to a signal, then with a checkpoint); the run's folder. Raises RLMegatronError."""
    assert config.run.name is not None
    folder = config.run.dir / config.run.name
    if resume:
        _check_same(config, config_io.load(str(folder / "config.yaml"), []))
    folder.mkdir(parents=True, exist_ok=True)
    config_io.save_resolved(config, folder / "config.yaml")
    progress = Progress(config.train.steps, config.log.progress, config.run.name, run_folder=folder)
    with run_log(folder, role="controller"), progress, _stop_signals(progress) as stop:
        await _train(config, folder, progress, stop, resume=resume)
    return folder


async def _train(config: RunConfig, folder: Path, progress: Progress, stop: asyncio.Event, *, resume: bool) -> None:
    progress.note("preparing the model")
    model_folder = await asyncio.to_thread(_model_folder, config)
    shape = ModelShape.from_folder(model_folder)
    Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=config.learner.dims)  # raises for degrees that do not divide
    progress.note(f"starting {config.learner.dims.world_size} learner processes and loading data")
    launcher: Launcher = LocalLauncher(model_folder, folder)
    loading = asyncio.create_task(asyncio.to_thread(_load, config, model_folder))
    async with launcher.start(config) as roles:
        tokenizer, train_prompts, eval_prompts = await loading
        recorder = Recorder(folder, config.log, progress)
        with contextlib.closing(recorder):
            trainer = _trainer(config, shape, roles, tokenizer, train_prompts, eval_prompts, recorder, stop, folder)
            await _begin(trainer, tokenizer, train_prompts, resume=resume)
            progress.phase("reinforcement")
            await trainer.run()
            await roles.weights.export(folder / f"hf_step_{trainer.step:06d}")
    from rl_megatron.observability.report import write_report

    progress.note(f"report: {write_report([folder], folder / 'report.html')}")


def _model_folder(config: RunConfig) -> Path:
    if config.model.path is not None:
        return config.model.path
    from rl_megatron.models.tiny import make_tiny_model

    return make_tiny_model(config.model.tiny, config.model.cache_dir, config.seed)


Loaded = tuple["PreTrainedTokenizerBase", list["Prompt"], list["Prompt"]]


def _load(config: RunConfig, model_folder: Path) -> Loaded:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads would take the learners' cores
    from transformers import AutoTokenizer

    from rl_megatron.data.prompts import load_prompts

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    train_prompts, eval_prompts = load_prompts(
        config.data,
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        on_long_prompt=config.rollout.on_long_prompt,
        seed=config.seed,
    )
    return tokenizer, train_prompts, eval_prompts


def _trainer(
    config: RunConfig,
    shape: ModelShape,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    recorder: Recorder,
    stop: asyncio.Event,
    folder: Path,
) -> Trainer:
    from rl_megatron.rollout.sampler import RolloutSampler

    from rl_megatron.algorithms.losses import PolicyLoss
    from rl_megatron.data.packing import causal_attention_cost
    from rl_megatron.data.prompts import PromptStream
    from rl_megatron.rewards.registry import resolve_reward
    from rl_megatron.trainer import Trainer

    a = config.algorithm
    return Trainer(
        config=config,
        roles=roles,
        sampler=RolloutSampler(
            roles.engine,
            resolve_reward(config.reward.function),
            partial(tokenizer.decode, skip_special_tokens=True),
            rollout=config.rollout,
            reward=config.reward,
            stop_token_ids=(tokenizer.eos_token_id,),
            seed=config.seed,
        ),
        prompts=PromptStream(train_prompts, seed=config.seed),
        eval_prompts=eval_prompts,
        policy_loss=PolicyLoss(
            ratio_level=a.ratio_level,
            objective=a.objective,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            cap_low=a.cap_low,
            cap_high=a.cap_high,
            aggregation=a.aggregation,
        ),
        attention_cost=causal_attention_cost(
            linear_parameters=shape.active_parameters,
            attention_width=shape.num_layers * shape.num_heads * shape.head_dim,
        ),
        checkpoints=checkpoints.CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep),
        recorder=recorder,
        stop=stop,
    )


async def _begin(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, train_prompts: Sequence[Prompt], *, resume: bool
) -> None:
    """Continue from the last checkpoint, or warm-start. Killed before the first checkpoint, a run starts over."""
    from rl_megatron.data.prompts import PromptStream
    from rl_megatron.warm_start import WarmStart

    progress = trainer.recorder.progress
    latest = trainer.checkpoints.latest() if resume else None
    trainer.recorder.truncate_after(checkpoints.step_of(latest) if latest else -1)
    if latest is not None:
        progress.note(f"resuming from {latest}")
        await trainer.restore(checkpoints.read(latest), latest)
        return
    if trainer.config.warm_start.steps:
        progress.phase("warm start", total=trainer.config.warm_start.steps)
    prompts = PromptStream(train_prompts, seed=trainer.config.seed + 1)
    await WarmStart(trainer=trainer, prompts=prompts, tokenizer=tokenizer).run()


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
