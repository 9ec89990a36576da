"""``rl-megatron train``: a run from its first step, or from a checkpoint, to its end."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from launcher.build.data import Data
from launcher.build.roles import Parts, job_of, started
from launcher.build.trainer import trainer_of
from launcher.controller.loop_watch import LoopWatch
from launcher.runs.name import claim
from launcher.runs.resume import find
from launcher.runs.stop import Stop, stop_signals
from rl_megatron.config.io import save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.data.prompts import PromptStream
from rl_megatron.durable import remove_folder
from rl_megatron.errors import RLMegatronError, Stopped
from rl_megatron.interfaces import RewardFunction
from rl_megatron.observability.log import run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.report import write_report
from rl_megatron.training.checkpoints import Checkpoint
from rl_megatron.training.stopping import unless_stopped
from rl_megatron.training.trainer import Trainer
from rl_megatron.training.warm_start import WarmStart

logger = logging.getLogger(__name__)


async def train(config: RunConfig, reward: RewardFunction, *, resume: bool) -> Path:
    """Run to the end (or to a signal, then with a checkpoint); the run's folder. Raises RLMegatronError."""
    assert config.run.name is not None
    folder = config.run.dir / config.run.name
    with claim(folder, resume=resume):
        parts = Parts(config=config, folder=folder, reward=reward, job=job_of(config, folder))
        start = find(config, folder) if resume else None
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
            trainer = trainer_of(parts, shape, roles, data, recorder, stop)
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
