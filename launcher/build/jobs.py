"""Builds the jobs of a run, in order, from roles, data and configuration."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial

from launcher.build.data import Data
from launcher.build.environment import demonstrations, made_environment
from launcher.build.roles import Parts, attention_cost
from launcher.build.sampler import sampler_of, samplers_of_sets
from launcher.build.written import written_job
from launcher.runs.resume import START_FOLDER
from rl_megatron.config.resume import fixed
from rl_megatron.config.sections.data import weights_of
from rl_megatron.data.packing import packer_of
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.evaluation.results import measured_by
from rl_megatron.interfaces import Roles
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.timeline.kernels import folder_of
from rl_megatron.rollout.batch import Ledger
from rl_megatron.scaling.flops import seconds_at_peak, training_flops
from rl_megatron.scaling.routes import route_of
from rl_megatron.training.checkpoints import CheckpointStore
from rl_megatron.training.evaluation import Evaluation, EvaluationBeside
from rl_megatron.training.group_job import GroupJob
from rl_megatron.training.jobs.rl import Reinforcement, stream_of
from rl_megatron.training.jobs.warm_start import WarmStart, answers
from rl_megatron.training.jobs.written import SupervisedSteps
from rl_megatron.training.loop import Loop, Pace
from rl_megatron.training.update import Update


def loops_of(
    parts: Parts,
    shape: ModelShape,
    roles: Roles,
    data: Data,
    recorder: Recorder,
    stop: asyncio.Event,
) -> tuple[Loop | None, Loop]:
    """The loop of the warm start, if the job has one, and the loop of the job. The processes must be up."""
    config = parts.config
    saves = config.checkpoint
    store = CheckpointStore(
        parts.folder / "checkpoints",
        keep=saves.keep,
        keep_best=saves.keep_best,
        config=fixed(config),
        measured_by=measured_by(config.model_dump(mode="json"), data.sets[0]),
        claimed=parts.claimed,
    )
    looped = partial(Loop, checkpoints=store, recorder=recorder, stop=stop, async_save=saves.async_save)
    every = Pace(steps=config.train.steps, rows=1, evaluations=config.eval.every, checkpoints=saves.every)
    steps, run = config.profile.steps, parts.folder.resolve()

    def profiled(step: int) -> AbstractAsyncContextManager[None]:
        return roles.record_kernels(config.profile.ranks, folder_of(run, step)) if step in steps else nullcontext()

    if not config.kind.samples:
        return None, looped(
            job=written_job(
                parts, shape, roles, data, attention_cost=attention_cost(shape), note=recorder.progress.note
            ),
            pace=every,
            profiled=profiled,
        )
    warm, job = _sampling(parts, shape, roles, data, recorder)
    check = config.warm_start.check_every
    first = Pace(steps=config.warm_start.steps, rows=check, evaluations=check, checkpoints=None)
    pace = replace(every, sets_due=job.evaluation.due)
    return looped(job=warm, pace=first), looped(job=job, pace=pace, profiled=profiled)


def _sampling(
    parts: Parts, shape: ModelShape, roles: Roles, data: Data, recorder: Recorder
) -> tuple[WarmStart, GroupJob]:
    """The warm start, and the job on groups of completions."""
    config, size, cost = parts.config, shape.vocab_size, attention_cost(shape)
    made = made_environment(config)
    sampler = sampler_of(config, made, roles.engine, parts.reward, data, vocab_size=size)
    evaluation = Evaluation(
        sampler=sampler,
        own=samplers_of_sets(config, roles.engine, data, vocab_size=size),
        sets=data.sets,
        section=config.eval,
        last_step=config.train.steps,
    )
    prompts = PromptStream(
        data.train,
        seed=config.seed,
        weights=weights_of(config.data),
        curriculum=config.data.curriculum,
        track_decay=config.algorithm.track_decay,
    )
    update = Update(
        config=config,
        roles=roles,
        attention_cost=cost,
        seconds_at_peak=seconds_at_peak(shape, roles.gpus, config.learner),
        training_flops=partial(training_flops, shape, learner=config.learner),
        tracked=None if prompts.table is None else prompts.table.value_of,
    )
    packer = packer_of(config.learner, attention_cost=cost)
    warm = WarmStart(
        config=config,
        roles=roles,
        prompts=PromptStream(data.train, seed=config.seed + 1, weights=weights_of(config.data)),
        tokenizer=data.tokenizer,
        end_token_ids=data.end_token_ids,
        stop_token_ids=data.stop_token_ids,
        vocab_size=size,
        targets=answers if made is None else demonstrations(made, config),
        evaluation=evaluation,
        supervised=SupervisedSteps(learner=roles.policy, packer=packer, optimizer_steps=update.policy_steps),
        note=recorder.progress.note,
    )
    beside = EvaluationBeside(evaluation=evaluation, recorder=recorder, at_once=config.eval.at_once)
    return warm, Reinforcement(
        config=config,
        roles=roles,
        prompts=prompts,
        stream=stream_of(config, prompts, sampler, Ledger(parts.folder / "ledger.jsonl")),
        evaluation=evaluation,
        update=update,
        start_folder=parts.folder / START_FOLDER,
        recorder=recorder,
        route=route_of(config).name,
        beside=beside if config.eval.mode != "blocking" else None,
    )
