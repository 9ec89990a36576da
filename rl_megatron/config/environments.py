"""Rules of the ``environment`` section and others: what no environment is combined with, and credit without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.removed import instead_of
from rl_megatron.config.sections.data import FileKeys, MixtureData, data_sources
from rl_megatron.config.sections.eval import RunData
from rl_megatron.config.sections.reward import EnvironmentSection, RewardSection

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig

RENDERED = "an environment's messages are rendered as a conversation, and a task's text is what it begins with; set"


def begun_by_messages(c: RunConfig) -> set[str]:
    """The keys of the data of sources and sets whose prompts may be lists of messages, with which an environment that
    renders a conversation begins."""
    chats = {key for key, one in c.environments.items() if one.template == "chat"}

    def leads(key: str) -> bool:
        return (key if key in c.environments else "environment") in chats

    of_run = {key for key in data_sources(c.data) if leads(f"{key}.environment")}
    of_sets = set[str]()
    for name, one in c.eval.sets.items():
        own = f"eval.sets.{name}.environment"
        if isinstance(one.data, RunData):
            of_run = of_run if one.environment is None or own in chats else set()
        elif own in chats or (one.environment is None and leads("")):
            of_sets.add(f"eval.sets.{name}.data")
    return of_run | of_sets


def problems_of_environments(c: RunConfig) -> Iterator[str]:
    """A line for each rule that the configuration breaks."""
    section = c.environment
    for key, one in c.environments.items():
        yield from _in_itself(key, one)
    yield from _rendered(c)
    yield from _of_sources(c)
    yield from _lengths(c)
    if c.algorithm.compares_states and _in_steps(c):
        yield (
            "algorithm.turn_baseline=state with reward.steps=true: a step begins where the one before it ends, and "
            "nothing that was read in between tells states apart; set turn_baseline=all or index"
        )
    if not c.training_environments:
        yield from _single_turns(c)
    for key, one in c.training_environments.items():
        given = f"{key}.function={one.function}"
        for other, why in _combined(c, key):
            yield f"{given} with {other}: {why}"
    if c.warm_start.steps and section.function is not None and section.template == "chat":
        yield (
            f"environment.function={section.function} with warm_start.steps={c.warm_start.steps}: an environment's "
            "demonstrations are plain texts, and its conversations would be the chat template's; set "
            "environment.template=plain, or warm_start.steps=0"
        )


def _of_sources(c: RunConfig) -> Iterator[str]:
    """What a source's own environment cannot be beside."""
    for name, source in c.data.sources.items() if isinstance(c.data, MixtureData) else ():
        key, one = f"data.sources.{name}.environment", source.environment
        if one is None:
            continue
        if one.function is None:
            yield f"{key} without a function: name one, or leave the section out, for what the run has"
        if source.reward is not None:
            yield (f"data.sources.{name}.reward with {key}: the environment gives the reward; leave one of them out")
        if c.warm_start.steps:
            yield (
                f"{key}.function={one.function} with warm_start.steps={c.warm_start.steps}: a warm start learns the "
                "answers of rows, or the demonstrations of the run's environment; set warm_start.steps=0"
            )
        if c.algorithm.overlong_buffer:
            yield (
                f"{key}.function={one.function} with algorithm.overlong_buffer={c.algorithm.overlong_buffer}: sources "
                "have other greatest lengths, and the buffer is below one; leave it out"
            )


def _lengths(c: RunConfig) -> Iterator[str]:
    """An overlong penalty that every completion or trajectory has."""
    buffer, most = c.algorithm.overlong_buffer, c.most_sampled
    if c.kind.samples and buffer >= max(1, most):
        limit = "environment.max_tokens" if "environment" in c.training_environments else "rollout.max_new_tokens"
        yield (
            f"algorithm.overlong_buffer={buffer:g} is not below {limit}={most}: every length would have a penalty; "
            "lower the first (below 1 it is a share, as 0.2), or raise the other"
        )


def _in_steps(c: RunConfig) -> bool:
    return any(one.steps for one in (c.reward, *c.source_rewards.values()))


def _single_turns(c: RunConfig) -> Iterator[str]:
    """What of completions has no turns or steps, without an environment."""
    in_steps = _in_steps(c)
    if c.algorithm.credit == "turn" and not in_steps:
        yield (
            "algorithm.credit=turn: without environment.function, and without reward.steps=true, a completion is one "
            "turn, for which it is credit=completion; set that, or one of the two"
        )
    if c.algorithm.ratio_level == "turn":
        yield (
            "algorithm.ratio_level=turn: without environment.function a completion is one turn, for which it is "
            "ratio_level=sequence; set that, or environment.function"
        )
    if in_steps and c.rollout.interrupt.earliest:
        yield (
            "reward.steps=true with rollout.interrupt: a completion that was interrupted is two turns already; leave "
            "one of the two out"
        )


def _in_itself(key: str, section: EnvironmentSection) -> Iterator[str]:
    """A function that has left the package, and keys of one section that contradict each other."""
    if text := instead_of("environment.function", section.function):
        yield f"{key}.function={section.function!r}: must be {text}"
    if section.thinking != "template" and section.template == "plain":
        yield f"{key}.thinking={section.thinking} with template=plain: no template drops anything; leave it out"
    if section.tool_parser is not None and section.template == "plain":
        yield (
            f"{key}.tool_parser={section.tool_parser} with template=plain: plain texts show neither tools nor "
            f"calls; set {key}.template=chat, or leave it out"
        )
    if section.min_turn_tokens > section.max_tokens:
        yield (
            f"{key}.min_turn_tokens={section.min_turn_tokens} is more than {key}.max_tokens="
            f"{section.max_tokens}, so no trajectory would have a turn; lower the first"
        )


def _rendered(c: RunConfig) -> Iterator[str]:
    """Problems whose texts a chat template rendered, in an environment of a set, which renders them itself."""
    for name, one in c.eval.sets.items():
        if one.environment is None:
            continue
        sources = data_sources(c.data) if isinstance(one.data, RunData) else {f"eval.sets.{name}.data": one.data}
        for key, source in sources.items():
            if isinstance(source, FileKeys) and source.chat_template:
                yield (
                    f"eval.sets.{name}.environment.function={one.environment.function} with {key}.chat_template=true: "
                    f"{RENDERED} {key}.chat_template=false"
                )


def _wrapped(c: RunConfig, led: str) -> Iterator[tuple[str, str]]:
    """Sources played in the environment ``led`` whose texts a chat template rendered, as it renders them itself."""
    for key, source in data_sources(c.data).items():
        its = f"{key}.environment" if f"{key}.environment" in c.environments else "environment"
        if its == led and isinstance(source, FileKeys) and source.chat_template:
            yield (
                f"{key}.chat_template=true",
                f"{RENDERED} {key}.chat_template=false",
            )


def _combined(c: RunConfig, led: str) -> Iterator[tuple[str, str]]:
    """What cannot be combined with the environment of the section ``led``, by its key, and why."""
    if c.algorithm.pairs:
        yield (
            f"algorithm.preference.beta={c.algorithm.preference.beta:g}",
            "pairs are of single completions; leave one of them out",
        )
    yield from _wrapped(c, led)
    if c.algorithm.advantage_mean == "greedy":
        yield (
            "algorithm.advantage_mean=greedy",
            "a greedy turn leads to other observations, so its trajectory is no baseline of the sampled ones; set "
            "advantage_mean=group",
        )
    if (asking := c.asks_for_routes) is not None:
        yield (
            asking,
            "engines return the routes of one request, and a turn's last token gets its own with the next request "
            "alone; leave it out",
        )
    if c.rollout.max_seconds is not None:
        yield (
            f"rollout.max_seconds={c.rollout.max_seconds:g}",
            "environment.seconds bounds a trajectory, sampling included; leave it out",
        )
    if led == "environment" and (c.reward != RewardSection() or c.own_rewards):
        yield (
            "reward",
            "the environment gives the reward; leave the keys of reward out, or have its score call what they name",
        )
