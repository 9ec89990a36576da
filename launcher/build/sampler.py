"""Chooses what samples groups and held-out problems: a reward judges single turns, or an environment leads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from launcher.build.data import Data
from launcher.build.environment import environment_sampler, made_environment
from rl_megatron.agents.conversation.templates import tokens_of_text
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import data_sources, name_of
from rl_megatron.data.demonstrations import Demonstrations
from rl_megatron.environments.registry import Agent, EnvironmentMaker
from rl_megatron.interfaces import RewardFunction, RolloutEngine
from rl_megatron.rollout.interruption import Interruption
from rl_megatron.rollout.policy_sampler import PolicySampler
from rl_megatron.rollout.sampler import RolloutSampler, SamplerBySource

if TYPE_CHECKING:
    from launcher.build.jobs import LearnedRows

logger = logging.getLogger(__name__)


def sampler_of(
    config: RunConfig,
    made: EnvironmentMaker | Agent | None,
    engine: RolloutEngine,
    reward: RewardFunction,
    data: Data,
    *,
    vocab_size: int,
) -> PolicySampler:
    """The sampler over ``engine`` of a model of ``vocab_size`` tokens; of ``made`` where there is one, which
    gives rewards itself, and for prompts of sources with an environment of their own in that."""
    usual: PolicySampler
    if made is not None:
        usual = environment_sampler(config, made, engine, data, vocab_size=vocab_size)
    else:
        usual = _single_turns(config, engine, reward, data, vocab_size)
    keys = {name: f"data.sources.{name}.environment" for name in config.source_names}
    own = _led(config, keys, engine, data, vocab_size)
    if not own:
        return usual
    return SamplerBySource(
        engine=engine,
        rollout=config.rollout,
        stop_token_ids=usual.stop_token_ids,
        seed=config.seed,
        usual=usual,
        own=own,
    )


def _single_turns(
    config: RunConfig, engine: RolloutEngine, reward: RewardFunction, data: Data, vocab_size: int
) -> RolloutSampler:
    decode = partial(data.tokenizer.decode, skip_special_tokens=True)
    shows = config.algorithm.demonstration_gamma is not None
    return RolloutSampler(
        engine=engine,
        reward_function=reward,
        decode=decode,
        interruption=_interruption(config, data, decode),
        rollout=config.rollout,
        reward=config.reward,
        own_rewards=config.own_rewards,
        stop_token_ids=() if config.rollout.ignore_eos else data.stop_token_ids,
        seed=config.seed,
        greedy_baseline=config.algorithm.advantage_mean == "greedy",
        routes=config.asks_for_routes is not None,
        demonstrate=demonstrations_of(config, data, vocab_size) if shows else None,
        apart=config.one_by_one,
    )


def demonstrations_of(config: RunConfig, data: Data | LearnedRows, vocab_size: int) -> Demonstrations:
    """The demonstrations of prompts to train on, for a model of ``vocab_size`` tokens."""
    sources = data_sources(config.data)
    return Demonstrations(
        fields={name_of(key): getattr(one, "demonstration_field", None) for key, one in sources.items()},
        tokenizer=data.tokenizer,
        end_token_ids=data.end_token_ids,
        stop_token_ids=data.stop_token_ids,
        vocab_size=vocab_size,
        most=config.rollout.max_new_tokens,
    )


def _interruption(config: RunConfig, data: Data, decode: Callable[[Sequence[int]], str]) -> Interruption | None:
    section = config.rollout.interrupt
    if not section.earliest:
        return None
    text, ends = (tokens_of_text(data.tokenizer, one) for one in (section.text, section.thinking_ends))
    latest = section.between(config.rollout.max_new_tokens)[1]
    if latest + len(text) >= config.rollout.max_new_tokens:
        logger.warning(
            "rollout.interrupt.text has %d tokens, which do not fit behind token %d of rollout.max_new_tokens=%d: such "
            "completions are not interrupted",
            *(len(text), latest, config.rollout.max_new_tokens),
        )
    return Interruption(section=section, token_ids=text, ends=ends, decode=decode)


def samplers_of_sets(
    config: RunConfig, engine: RolloutEngine, data: Data, *, vocab_size: int
) -> dict[str, PolicySampler]:
    """The samplers of the sets that have an environment of their own, by the set's name."""
    keys = {name: f"eval.sets.{name}.environment" for name in config.eval.sets}
    return _led(config, keys, engine, data, vocab_size)


def _led(
    config: RunConfig,
    keys: Mapping[str, str],
    engine: RolloutEngine,
    data: Data,
    vocab_size: int,
) -> dict[str, PolicySampler]:
    """The samplers in the environments of these sections that name one, by the names of ``keys``."""
    out: dict[str, PolicySampler] = {}
    for name, key in keys.items():
        if (made := made_environment(config, key)) is not None:
            out[name] = environment_sampler(config, made, engine, data, vocab_size=vocab_size, key=key)
    return out
