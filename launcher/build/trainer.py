"""A Trainer of roles, data and configuration."""

from __future__ import annotations

import asyncio
from functools import partial

from launcher.build.data import Data
from launcher.build.roles import Parts
from rl_megatron.config.resume import fixed
from rl_megatron.data.packing import causal_attention_cost
from rl_megatron.data.prompts import PromptStream
from rl_megatron.interfaces import Roles
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.recorder import Recorder
from rl_megatron.rollout.pairs import OfflinePairs
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.training.checkpoints import CheckpointStore
from rl_megatron.training.trainer import Trainer
from rl_megatron.training.update import Update


def trainer_of(
    parts: Parts, shape: ModelShape, roles: Roles, data: Data, recorder: Recorder, stop: asyncio.Event
) -> Trainer:
    """The trainer of a run whose processes are up."""
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
