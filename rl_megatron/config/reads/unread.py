"""Refuses a set key that no choice of the configuration reads: it would change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.reads.algorithm import unread_of_algorithm
from rl_megatron.config.reads.leaves import does_nothing, set_leaves
from rl_megatron.config.sections.data import ArithmeticData, FileKeys, MixtureData, data_sources
from rl_megatron.config.sections.eval import RunData
from rl_megatron.config.sections.reward import RANKS, reward_key
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.reward import RewardSection


def problems_of_unread_keys(config: RunConfig) -> list[str]:
    """A line for each set key that nothing reads: what would read it, and its default."""
    sections: list[tuple[str, Section]] = [("model", config.model), ("algorithm", config.algorithm)]
    sections += [("rollout", config.rollout), *_rewards(config), ("train", config.train), ("weights", config.weights)]
    beside = ("run", "data", "sandbox", "environment", "warm_start", "eval", "checkpoint", "log", "slurm")
    sections += [(name, getattr(config, name)) for name in beside]
    given = {name: leaf for key, section in sections for name, leaf in set_leaves(key, section)}
    unread = (
        _of_model,
        unread_of_algorithm,
        _of_rollout,
        _of_rewards,
        _of_train,
        _of_weights,
        _of_programs,
        _of_rest,
    )
    inside: dict[str, list[str]] = {}  # of each section and key, the given keys
    for name in given:
        for key in itertools.accumulate(name.split("."), "{}.{}".format):
            inside.setdefault(key, []).append(name)
    reasons: dict[str, str] = {}
    for key, reason in itertools.chain.from_iterable(of_section(config) for of_section in unread):
        for name in inside.get(key, ()):
            reasons.setdefault(name, reason)
    return [does_nothing(name, leaf, reasons[name]) for name, leaf in given.items() if name in reasons]


def _of_model(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys that nothing reads, each with the reason; so do the functions below, of their sections."""
    sources = (*data_sources(config.data).values(), *config.eval.data_of_sets.values())
    shown = any(isinstance(one, FileKeys) and (one.chat_template or one.messages_field) for one in sources)
    if not shown and all(one.template != "chat" for one in config.environments.values()):
        reason = "no data has chat_template=true or messages_field, and no environment has template=chat"
        yield "model.template_variables", reason
    if config.model.path is not None:
        for key in ("model.tiny", "model.cache_dir"):
            yield key, f"model.path={config.model.path} is the model, and no tiny one is made"
    if not config.warm_start.steps:
        yield "warm_start", "warm_start.steps=0 is no warm start"


def _of_rollout(config: RunConfig) -> Iterator[tuple[str, str]]:
    rollout = config.rollout
    if not rollout.served:
        reason = f"rollout.engine={rollout.engine} samples in the learner's processes, and only servers read it"
        yield from (("rollout.python", reason), ("rollout.server", reason))
    elif rollout.embedded:
        reason = f"servers of rollout.engine={rollout.engine} run in the trainer's interpreter, on CPUs"
        yield from (("rollout.python", reason), ("rollout.server.memory_fraction", reason))
    at_pushes = config.train.max_staleness or config.eval.mode == "beside" or config.environments
    if rollout.served and not at_pushes and rollout.server.addresses is None:
        reason = f"with train.max_staleness=0 and eval.mode={config.eval.mode} no request runs at a push"
        yield "rollout.server.running_requests", reason
    if not rollout.server.draft_tokens:
        yield "slurm.speeds.draft_acceptance", "with rollout.server.draft_tokens=0 nothing is proposed"


def _of_rewards(config: RunConfig) -> Iterator[tuple[str, str]]:
    sources = config.data.sources.values() if isinstance(config.data, MixtureData) else ()
    sets = [one for one in config.eval.sets.values() if not isinstance(one.data, RunData)]
    if sources and all(one.reward or one.environment for one in (*sources, *sets)):
        judged = "data.sources and every set of eval.sets with data of its own" if sets else "data.sources"
        yield "reward", f"every source of {judged} has a reward or an environment of its own"
    for above, its in _rewards(config):
        for section, does in _reward_options(its).items():
            if not does:
                reason = f"no reward reads it that {above}.function={its.function} or {above}.parts name"
                yield f"{above}.{section}", reason
        if config.algorithm.credit != "turn":
            reason = f"algorithm.credit={config.algorithm.credit} compares whole completions, credit=turn their steps"
            yield f"{above}.steps", reason


def _of_train(config: RunConfig) -> Iterator[tuple[str, str]]:
    key, beta = "train.whole_groups", config.algorithm.preference.beta
    if config.train.minibatches == 1:
        yield key, "with train.minibatches=1 a minibatch is the whole batch"
    elif beta is not None:
        yield key, f"algorithm.preference.beta={beta} keeps each group's pair together"
    elif config.rollout.group_size == 1 and config.algorithm.demonstration_gamma is None:
        yield key, "with rollout.group_size=1 a group is one completion"
    if config.train.lr_decay == "none":
        yield "train.lr_min", "train.lr_decay=none keeps the learning rate; set linear or cosine"
    if config.written_epochs is not None:
        yield "train.steps", f"{config.job}.epochs={config.written_epochs:g} says how many steps there are"


def _of_weights(config: RunConfig) -> Iterator[tuple[str, str]]:
    if not config.rollout.served:
        reason = f"rollout.engine={config.rollout.engine} samples in the learner's processes, and only servers use it"
        yield from ((f"weights.{key}", reason) for key in ("folder", "meeting_host"))
    elif not config.transport.direct:
        way = config.weights.transport
        yield "weights.meeting_host", f"weights.transport={way} is a file here, and weights.transport=direct reads it"


def _of_programs(config: RunConfig) -> Iterator[tuple[str, str]]:
    tested = any("tests" in its.functions.values() for _, its in _rewards(config))
    if not tested and not config.environments:
        yield "sandbox", "only reward.function=tests and environments run programs"
    if config.environment.function is None:
        yield "environment", "without environment.function there is no environment"


def _of_rest(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys of data, of what is measured, evaluated, kept and shown beside the steps, and of containers."""
    if isinstance(config.data, ArithmeticData) and not config.eval.data_of_sets:
        yield "data.on_leak", "data.type=arithmetic holds out what it does not train on"
    if config.eval.sets and all(one.temperature is not None for one in config.eval.sets.values()):
        yield "eval.temperature", "every set of eval.sets has a temperature of its own"
    if not config.log.samples_per_step:
        yield "log.samples_per_group", "log.samples_per_step=0 writes none of any group"
    if config.log.wandb == "off":
        yield "log.wandb_project", "log.wandb=off sends no metrics"
    if config.slurm.container is None:
        for key in ("runtime", "mounts") if config.slurm.engines.container is None else ():
            yield f"slurm.container_{key}", "without slurm.container and slurm.engines.container nothing runs in one"
        yield "slurm.container_python", "without slurm.container ranks run in slurm.python"


def _rewards(config: RunConfig) -> list[tuple[str, RewardSection]]:
    """The run's reward and those of sources and sets, each with the key of its section."""
    return [("reward", config.reward), *((reward_key(name), reward) for name, reward in config.own_rewards.items())]


def _reward_options(reward: RewardSection) -> dict[str, bool]:
    """For each inner section of a reward: whether a function of it reads that."""
    names = reward.functions.values()
    return {
        "format": "format" in names,
        "length": "length" in names,
        "tests": "tests" in names,
        "http": any(name.startswith(("http://", "https://")) for name in names),
        "model": any(name.startswith(("hf:", RANKS)) for name in names),
        **{f"model.{key}": any(name.startswith("hf:") for name in names) for key in ("label", "device")},
    }
