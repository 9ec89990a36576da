"""Compares the model's sizes with the layout, the lengths and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.config.beside import frozen_folders, in_words_of
from rl_megatron.config.learner_checks import refuse
from rl_megatron.config.rules import problems_of
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.feature import given_to_servers
from rl_megatron.models.named import expect
from rl_megatron.models.shape import ModelShape, length_problem
from rl_megatron.weights.layouts.families import FAMILIES, family_of
from rl_megatron.weights.layouts.learner import learner_layout, role_layout


def check(subject: Subject) -> Iterator[Found]:
    """Yields a problem for each size of the model that the configuration does not fit. Raises ConfigError."""
    yield from size_problems(subject.config, subject.shape)
    yield from _servers(subject)


def size_problems(config: RunConfig, shape: ModelShape) -> Iterator[Found]:
    """A problem for each size of the model that the configuration does not fit."""
    yield from _engine(config, shape)
    yield from map(problem, problems_of(config, "shape", shape))
    try:
        expect(config.model.name, shape)
        learner_layout(config, shape)
        refuse(shape, config.learner)
    except ConfigError as error:
        yield problem(str(error))
    yield from _own_layouts(config, shape)
    longest = config.longest_sequence
    if too_long := length_problem(shape, config.named_longest, longest):
        tiny = "" if config.model.path else f" or set model.tiny.max_position_embeddings={longest}"
        yield problem(too_long + tiny)
    sampled = replace(shape, indexer=None) if config.rollout.served else shape  # servers choose among all keys
    for name, one in config.eval.sets.items():
        new, before = one.max_new_tokens or 0, config.rollout.max_prompt_tokens
        keys = f"rollout.max_prompt_tokens={before} + eval.sets.{name}.max_new_tokens={new}"
        if new > config.rollout.max_new_tokens and (too_long := length_problem(sampled, keys, before + new)):
            yield problem(too_long)


def _servers(subject: Subject) -> Iterator[Found]:
    """Yields what servers of the configured engine cannot do for the model; those of a user's own say so at a start."""
    config, shape, environment = subject.config, subject.shape, subject.environment
    server, engine = config.rollout.server, config.rollout.engine
    given = {config.rollout.temperature, *config.eval.temperatures.values()}
    keys = config.weights.push == "adapters", server.batch_invariant, server.options, *given_to_servers(config).values()
    tuned = any(name.startswith(f"{engine.upper()}_") for name in environment)
    if not (config.rollout.served and (any(keys) or tuned or config.rollout.top_p < 1 or given - {0.0, 1.0})):
        return
    try:
        from launcher.servers.engines import KNOWN, engine_problems
    except ImportError:  # no torch on a login node
        yield unchecked(f"whether {engine} takes what servers are given: torch cannot be imported here")
        return
    if engine in KNOWN:
        yield from map(problem, engine_problems(config, KNOWN[engine](shape), shape, environment))


def _own_layouts(config: RunConfig, shape: ModelShape) -> Iterator[Found]:
    """Yields why a role's own layout does not fit the policy's sizes; a frozen model of a folder has others."""
    of_folders = {role for role, (folder, _) in frozen_folders(config).items() if folder is not None}
    for role in config.roles.layouts:
        if role in of_folders:
            continue
        try:
            role_layout(config, shape, role)
            refuse(shape, config.learner_of(role))
        except ConfigError as error:
            yield problem(in_words_of(config, role, str(error)))


def _engine(config: RunConfig, shape: ModelShape) -> Iterator[Found]:
    """Yields why the in-process engine cannot sample from the model."""
    if config.kind.samples and not (config.rollout.served or family_of(shape).serves):
        allowed = [name for name, family in FAMILIES.items() if family.serves]
        yield problem(
            f"model_type={shape.family!r}: the in-process engine does not support it; allowed: "
            f"{', '.join(map(repr, allowed))}; rollout=vllm or rollout=sglang supports others"
        )
