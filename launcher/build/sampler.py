"""Chooses the sampler of groups and held-out problems: a reward scores single turns, or an environment leads them.

Builds the source of groups with trajectories that an environment leads, and the targets of its warm start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from launcher.build.data import Data
from launcher.processes.guards import HERE
from rl_megatron.agents.conversation.probe import probe_template
from rl_megatron.agents.conversation.rendering import get_chat_template
from rl_megatron.agents.conversation.templates import PlainText, Template, encode_text
from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.agents.parsers import PARSERS, WRITTEN
from rl_megatron.agents.source import EnvironmentSampler, RequestBatcher
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources, source_name
from rl_megatron.data.problems.rendering import read_demonstration
from rl_megatron.data.samples import EndTokens, check_ends, check_tokens, supervised_rows
from rl_megatron.environments.registry import Agent, EnvironmentFactory, demonstrate, resolve_environment
from rl_megatron.errors import DataError
from rl_megatron.feature import sampler_hooks
from rl_megatron.interfaces import RewardFunction, RolloutEngine
from rl_megatron.rollout.policy_sampler import PolicySampler
from rl_megatron.rollout.sampler import RolloutSampler, SourceSampler
from rl_megatron.seeds import text_seed
from rl_megatron.training.jobs.warm_start import Targets
from rl_megatron.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from launcher.build.jobs import LearnedRows

logger = logging.getLogger(__name__)


def make_sampler(
    config: RunConfig,
    factory: EnvironmentFactory | Agent | None,
    engine: RolloutEngine,
    reward: RewardFunction,
    data: Data,
    *,
    vocab_size: int,
) -> PolicySampler:
    """Returns the sampler over ``engine`` of a model of ``vocab_size`` tokens. It uses ``factory``, if given, which
    gives rewards itself. Prompts of sources with an environment of their own are sampled in that one."""
    usual: PolicySampler
    if factory is not None:
        usual = environment_sampler(config, factory, engine, data, vocab_size=vocab_size)
    else:
        usual = _single_turns(config, engine, reward, data, vocab_size)
    keys = {name: f"data.sources.{name}.environment" for name in config.source_names}
    own = _environment_samplers(config, keys, engine, data, vocab_size)
    if not own:
        return usual
    return SourceSampler(
        engine=engine,
        rollout=config.rollout,
        stop_token_ids=usual.stop_token_ids,
        seed=config.seed,
        default=usual,
        source_samplers=own,
    )


def _single_turns(
    config: RunConfig, engine: RolloutEngine, reward: RewardFunction, data: Data, vocab_size: int
) -> RolloutSampler:
    shows = config.algorithm.demonstration_gamma is not None
    return RolloutSampler(
        engine=engine,
        reward_function=reward,
        decode=partial(data.tokenizer.decode, skip_special_tokens=True),
        hooks=sampler_hooks(config, data.tokenizer),
        rollout=config.rollout,
        reward=config.reward,
        source_rewards=config.own_rewards,
        stop_token_ids=() if config.rollout.ignore_eos else data.stop_token_ids,
        seed=config.seed,
        greedy_baseline=config.algorithm.advantage_mean == "greedy",
        columns=tuple(config.required_columns),
        demonstrate=make_demonstrations(config, data, vocab_size) if shows else None,
        one_request_each=config.one_by_one,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The demonstration of a prompt: the text of its source's field, or its answer, and the token that ends it."""

    fields: Mapping[str, str | None]  # source -> its ``data.fields.demonstration``
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: EndTokens
    stop_token_ids: Sequence[int]
    vocab_size: int  # the policy's
    max_tokens: int  # tokens that the policy may sample

    def __call__(self, prompt: Prompt) -> Completion:
        """Returns it without spans, with log-probs of 0: its author was certain. Raises DataError if it has
        more tokens than are sampled, a token that the model lacks, or one that ends sampling before its end."""
        name, place = self.fields[prompt.source], f"prompt {prompt.id!r}"
        text = prompt.answer if name is None else read_demonstration(prompt.meta, place, name)
        rows = supervised_rows([prompt], [(text,)], self.tokenizer, self.end_token_ids)
        check_tokens(rows, self.vocab_size)
        check_ends(rows, self.stop_token_ids)
        tokens = rows[0].token_ids[len(prompt.token_ids) :]
        if len(tokens) > self.max_tokens:
            raise DataError(
                f"{place}: its demonstration has {len(tokens)} tokens, but rollout.max_new_tokens={self.max_tokens}; "
                "raise "
                "the latter, or leave the row out"
            )
        return Completion(token_ids=tokens, logprobs=np.zeros(len(tokens), np.float32), finish_reason="stop", spans=())


def make_demonstrations(config: RunConfig, data: Data | LearnedRows, vocab_size: int) -> Demonstrations:
    """Returns the demonstrations of prompts to train on, for a model of ``vocab_size`` tokens."""
    sources = data_sources(config.data)
    return Demonstrations(
        fields={
            source_name(key): one.fields["demonstration"] if isinstance(one, FileKeys) else None
            for key, one in sources.items()
        },
        tokenizer=data.tokenizer,
        end_token_ids=data.end_token_ids,
        stop_token_ids=data.stop_token_ids,
        vocab_size=vocab_size,
        max_tokens=config.rollout.max_new_tokens,
    )


def make_set_samplers(
    config: RunConfig, engine: RolloutEngine, data: Data, *, vocab_size: int
) -> dict[str, PolicySampler]:
    """Returns the samplers of the sets that have an environment of their own, by the set's name."""
    keys = {name: f"eval.sets.{name}.environment" for name in config.eval.sets}
    return _environment_samplers(config, keys, engine, data, vocab_size)


def _environment_samplers(
    config: RunConfig, keys: Mapping[str, str], engine: RolloutEngine, data: Data, vocab_size: int
) -> dict[str, PolicySampler]:
    """Returns the samplers in the environments of these sections that name one, by the names of ``keys``."""
    out: dict[str, PolicySampler] = {}
    for name, key in keys.items():
        if (made := load_environment(config, key)) is not None:
            out[name] = environment_sampler(config, made, engine, data, vocab_size=vocab_size, key=key)
    return out


def load_environment(config: RunConfig, key: str = "environment") -> EnvironmentFactory | Agent | None:
    """Returns the environment or agent of the section ``key``, if any. Raises the errors of `resolve_environment`."""
    section = config.environments.get(key)
    return None if section is None else resolve_environment(section, config.sandbox, key=key)


def environment_sampler(
    config: RunConfig,
    factory: EnvironmentFactory | Agent,
    engine: RolloutEngine,
    data: Data,
    *,
    vocab_size: int,
    key: str = "environment",
) -> EnvironmentSampler:
    """Returns the source in ``factory``, of the section ``key``, over ``engine`` of a model of ``vocab_size`` tokens.
    An engine in the learner's processes samples in waves.

    Logs the effect of a chat template on rows, as a warning if every turn is one, or if it refuses conversations.
    """
    section, tokenizer = config.environments[key], data.tokenizer
    if isinstance(factory, Agent):
        _leave_out_of_proxies(HERE)
    template: Template = PlainText(tokenizer)
    if section.template == "chat":
        template = ChatTemplate(tokenizer, thinking=section.thinking)
        report = probe_template(template, data.stop_token_ids)
        bad = report.habit == "rewrites" or report.refusals
        logger.log(logging.WARNING if bad else logging.INFO, "%s", report.describe())
        _warn_of_calls(tokenizer, section.tool_parser, key)
        if section.tool_parser is not None and not report.shows_tools:
            logger.warning(
                "%s.tool_parser=%s, but the model's chat template shows no tools, so that a conversation with some is "
                "refused; give the model a template that shows them, or describe them in a message",
                key,
                section.tool_parser,
            )
        if (
            report.habit != "appends"
            and config.algorithm.credit in ("gae", "discounted", "optimal")
            and key in config.training_environments
        ):
            logger.warning(
                "algorithm.credit=%s goes from token to token, so a trajectory of several rows ends the run; set "
                "%s.thinking=keep, another model's template, or credit=completion or turn",
                config.algorithm.credit,
                key,
            )
    return EnvironmentSampler(
        engine=engine if config.rollout.served else RequestBatcher(engine),
        factory=factory,
        template=template,
        encode=partial(encode_text, tokenizer),
        parser=None if section.tool_parser is None else PARSERS[section.tool_parser],
        columns=tuple(config.required_columns),
        rollout=config.rollout,
        section=section,
        key=key,
        vocab_size=vocab_size,
        stop_token_ids=() if config.rollout.ignore_eos else data.stop_token_ids,
        seed=config.seed,
    )


def _warn_of_calls(tokenizer: PreTrainedTokenizerBase, parser: str | None, key: str) -> None:
    """Warns if neither the chat template nor the tokenizer has the mark of calls in the parser's format."""
    mark = WRITTEN.get(parser or "")
    if mark is None or mark in tokenizer.get_added_vocab():
        return
    if mark not in get_chat_template(tokenizer, with_tools=True):
        logger.warning(
            "%s.tool_parser=%s reads calls with %s, which is neither in the model's chat template nor a token of its "
            "own: a model that writes calls otherwise would call nothing; set the parser of its format",
            key,
            parser,
            mark,
        )


def _leave_out_of_proxies(host: str) -> None:
    """Makes clients of agents, here and in processes that they start, send requests to ``host`` without a proxy. The
    environment's proxy, which clusters often have, could not reach it, and would read their requests and keys."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if given.strip() != "*" and host not in given.replace(" ", "").split(","):
        given = f"{given},{host}" if given else host
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = given


def demonstrations(factory: EnvironmentFactory | Agent, config: RunConfig) -> Targets:
    """Returns the targets of the warm start: the environment's own texts, another choice of them in each step. Raises
    the errors of `demonstrate`."""
    function, seed = config.environment.function, config.seed

    def step_texts(prompts: Sequence[Prompt], step: int) -> list[Sequence[str]]:
        assert isinstance(factory, EnvironmentFactory)  # preflight
        seeds = [text_seed(f"demonstration {seed} {step} {place}") for place in range(len(prompts))]
        return demonstrate(factory, function, prompts, seeds)

    return step_texts
