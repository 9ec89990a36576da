"""Compares the model's sizes with the layout, the lengths and the engine. Compares the sequences of a step with the
ranks that share them and the models that learn from them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.subject import Finding, PreflightContext, note, problem, unchecked
from rl_megatron.config.beside import frozen_folders, with_role_keys
from rl_megatron.config.learner_checks import refuse, sparse_problem
from rl_megatron.config.reads import READS
from rl_megatron.config.rules import find_problems
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import data_sources
from rl_megatron.errors import ConfigError
from rl_megatron.feature import given_to_servers
from rl_megatron.models.named import expect
from rl_megatron.models.shape import ModelShape, length_problem
from rl_megatron.weights.layouts.families import FAMILIES, find_family
from rl_megatron.weights.layouts.learner import learner_layout, role_layout


def check(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem for each size of the model that the configuration does not fit. Raises ConfigError."""
    yield from size_problems(subject.config, subject.shape)
    yield from _servers(subject)


def size_problems(config: RunConfig, shape: ModelShape) -> Iterator[Finding]:
    """Yields a problem for each size of the model that the configuration does not fit."""
    yield from _engine(config, shape)
    yield from map(problem, find_problems(config, "shape", shape))
    try:
        expect(config.model.name, shape)
        learner_layout(config, shape)
        refuse(shape, config.learner)
    except ConfigError as error:
        yield problem(str(error))
    yield from _own_layouts(config, shape)
    longest = config.longest_sequence
    if too_long := length_problem(shape, config.named_longest, longest, sparse_problem(config.learner, shape)):
        tiny = "" if config.model.path else f" or set model.tiny.max_position_embeddings={longest}"
        yield problem(too_long + tiny)
    for name, one in config.eval.sets.items():
        new, before = one.max_new_tokens or 0, config.rollout.max_prompt_tokens
        keys = f"rollout.max_prompt_tokens={before} + eval.sets.{name}.max_new_tokens={new}"
        if new > config.rollout.max_new_tokens and (too_long := length_problem(shape, keys, before + new)):
            yield problem(too_long)


def _servers(subject: PreflightContext) -> Iterator[Finding]:
    """Yields what servers of the configured engine cannot do for the model; those of a user's own say so at a start."""
    config, shape, environment = subject.config, subject.shape, subject.environment
    server, engine = config.rollout.server, config.rollout.engine
    given = {config.rollout.temperature, *config.eval.temperatures.values()}
    keys = server.batch_invariant, server.options, *given_to_servers(config).values()
    tuned = any(name.startswith(f"{engine.upper()}_") for name in environment)
    if not (config.rollout.served and (any(keys) or tuned or config.rollout.limits or given - {0.0, 1.0})):
        return
    try:
        from launcher.servers.engines import KNOWN, engine_problems
    except ImportError:  # no torch on a login node
        yield unchecked(f"whether {engine} accepts the options of the servers: torch cannot be imported here")
        return
    if engine in KNOWN:
        yield from map(problem, engine_problems(config, KNOWN[engine](shape), shape, environment))


def _own_layouts(config: RunConfig, shape: ModelShape) -> Iterator[Finding]:
    """Yields why a role's own layout does not fit the policy's sizes; a frozen model of a folder has others."""
    of_folders = {role for role, (folder, _) in frozen_folders(config).items() if folder is not None}
    for role in config.roles.layouts:
        if role in of_folders:
            continue
        try:
            role_layout(config, shape, role)
            refuse(shape, config.role_learner(role))
        except ConfigError as error:
            yield problem(with_role_keys(config, role, str(error)))


def _engine(config: RunConfig, shape: ModelShape) -> Iterator[Finding]:
    """Yields why the in-process engine cannot sample from the model."""
    if config.kind.samples and not (config.rollout.served or find_family(shape).serves):
        allowed = [name for name, family in FAMILIES.items() if family.serves]
        yield problem(
            f"model_type={shape.family!r}: the in-process engine does not support it; allowed: "
            f"{', '.join(map(repr, allowed))}; rollout=vllm or rollout=sglang supports others"
        )


def check_batches(subject: PreflightContext) -> Iterator[Finding]:
    """Yields notes if an optimizer step has fewer sequences than data-parallel ranks, or trajectories and servers wait
    for each other. Also yields notes if groups with a gradient are left out, samples of an older policy have no ratio,
    or no step trains the policy."""
    config, ranks = subject.config, subject.config.learner.dims.dp
    sequences = config.trained_per_step // config.train.minibatches
    if not config.kind.samples:
        yield from _written(config, ranks)
    elif sequences < ranks:
        pairs = f"rollout.prompts_per_step={config.rollout.prompts_per_step} * 2 of a pair"
        of_step = pairs if config.algorithm.pairs else config.named_compared
        yield note(
            f"an optimizer step has {sequences} sequences ({of_step} / train.minibatches="
            f"{config.train.minibatches}) for {ranks} data-parallel ranks (learner.dp), so {ranks - sequences} of them "
            "are idle; raise rollout.prompts_per_step, or lower train.minibatches"
        )
    yield from _trajectories(config)
    mode, mean_of = config.rollout.dynamic_sampling, config.algorithm.advantage_mean
    if mode != "off" and not config.algorithm.needs_differences:
        yield note(
            f"rollout.dynamic_sampling={mode} drops groups of equal rewards, but algorithm.advantage_mean="
            f"{mean_of} learns from them unless they are 0 (REINFORCE-Rej); to train on them, set "
            "rollout.dynamic_sampling=off"
        )
    yield from _check_ratio(config)
    yield from _limited(config)
    alone = config.algorithm.critic.only_steps
    if config.algorithm.needs_critic and alone >= config.train.steps:
        yield note(
            f"algorithm.critic.only_steps={alone} covers all of train.steps={config.train.steps}, so the run "
            "trains only the critic, never the policy; raise train.steps, or lower the first key"
        )


def _check_ratio(config: RunConfig) -> Iterator[Finding]:
    """Yields a note if the objective assumes samples of the current policy, but gets older ones."""
    a, train = config.algorithm, config.train
    if not config.kind.samples or READS["objective"].get(a.objective) != ():  # a ratio has keys
        return
    given = f"algorithm.objective={a.objective} has no ratio and assumes samples of the current policy, but"
    if train.minibatches * train.epochs > 1:
        yield note(
            f"{given} train.minibatches={train.minibatches} * train.epochs={train.epochs} are optimizer steps on one "
            "batch, and only the first is on such samples; set both to 1, or algorithm.objective=importance"
        )
    if train.max_staleness and a.correction.mode == "none":
        yield note(
            f"{given} train.max_staleness={train.max_staleness} lets older policies sample; set "
            "algorithm.correction.mode=truncate, or train.max_staleness=0"
        )


def _limited(config: RunConfig) -> Iterator[Finding]:
    """Notes ratios of tokens to the engine, which ``rollout.top_p`` and ``top_k`` make too small."""
    a, limits = config.algorithm, "" if config.limits_are_shared else config.rollout.limits
    readers = {
        "algorithm.correction": a.correction.acts,
        f"algorithm.tokens.choose={a.tokens.choose}": a.tokens.choose == "second_moment",
        "algorithm.kl.importance_weighted=true": a.kl.coefficient > 0
        and (a.kl.placement, a.kl.importance_weighted, a.needs_top) == ("loss", True, False),
        f"algorithm.objective={a.objective}, if it reads rollout_logprobs": ":" in a.objective,
    }
    if limits and config.kind.samples and not a.pairs and (read := [key for key, reads in readers.items() if reads]):
        yield note(
            f"{limits}: the engine's log-probs are of the tokens that it keeps and the learner's of all, so ratios of "
            f"tokens are too small by the probability of the rest in {', '.join(read)}; use "
            "sampling masks (docs/engines.md), or set rollout.top_p=1 and rollout.top_k=0"
        )


def _trajectories(config: RunConfig) -> Iterator[Finding]:
    """Compares running trajectories with the turns that servers may have in flight, if one environment has them all."""
    if set(config.training_environments) != {"environment"} or not config.rollout.served:
        return
    most, server, group = config.environment.concurrency, config.rollout.server, config.rollout.group_size
    turns, wanted = server.max_concurrent_groups * group, config.completions_per_step * (1 + config.train.max_staleness)
    if config.rollout.max_in_flight is not None:
        wanted = min(wanted, config.rollout.max_in_flight)
    groups = f"rollout.server.max_concurrent_groups={server.max_concurrent_groups}"
    at_servers = f"{turns} turns ({groups} * rollout.group_size={group})"
    if min(most, wanted) > turns:
        yield note(
            f"{min(most, wanted)} trajectories run concurrently (environment.concurrency={most}), but servers have "
            f"at most {at_servers} in flight, and waiting counts toward environment.seconds; raise "
            "rollout.server.max_concurrent_groups, or lower environment.concurrency"
        )
    elif most < min(turns, wanted):
        yield note(
            f"environment.concurrency={most} of {wanted} trajectories run concurrently, but "
            f"servers could have {at_servers} in flight, so they may be idle; raise environment.concurrency"
        )


def _written(config: RunConfig, ranks: int) -> Iterator[Finding]:
    """Yields the same notes for a step on rows or pairs, which has no minibatches; ranks do not share a pair."""
    size, what = config.written.batch_size, "pairs" if config.kind.rows == "pairs" else "rows"
    if size < ranks:
        yield note(
            f"an optimizer step has {size} {what} ({config.job}.batch_size) for {ranks} data-parallel ranks "
            f"(learner.dp), so {ranks - size} of them are idle; raise {config.job}.batch_size, or lower learner.dp"
        )
    if config.written.epochs is not None and len(data_sources(config.data)) > 1:
        yield note(
            f"{config.job}.epochs={config.written.epochs:g} counts the {what} of all sources, but "
            f"data.sources.<name>.weight decides how often each source is drawn: unless weights are proportional to "
            f"the numbers of {what}, some {what} are drawn more often than others, or never"
        )
