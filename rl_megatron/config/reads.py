"""Rejects a set key that no choice of the configuration reads, because it would change nothing.

`READS` lists the keys that each choice of the ``algorithm`` section reads. A test checks the table: each key changes
what a step does, or is refused. A job refuses keys that it does not read, and data of another form than it trains on.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from rl_megatron.config.sections.data import (
    TURNS_IN_TEXT,
    ArithmeticData,
    FileKeys,
    MixtureData,
    data_sources,
    source_rewards,
)
from rl_megatron.config.sections.eval import RunData
from rl_megatron.config.sections.jobs import JOBS, JobKind
from rl_megatron.config.sections.reward import RANKS, reward_key
from rl_megatron.feature import section_keys
from rl_megatron.rules import Leaf, as_given, contains_leaf, does_nothing, set_leaves
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.algorithm import AlgorithmSection
    from rl_megatron.config.sections.reward import RewardSection


ON, OFF = "on", "off"
"""The states of a choice that is a number: off is 0 or null, on is any other."""
OWN = "package.module:name"
"""The state of a choice that is code of the user's own."""
_CORRECTION = ("correction.level", "correction.high")
_OF_RATIOS = (*_CORRECTION, "correction.low")
_OF_THE_GAP = ("correction.mode", "correction.veto")
_KL = tuple(f"kl.{key}" for key in ("placement", "estimator", "importance_weighted", "top_k", "beta", "teachers"))
_OF_SAPO = ("parameters.tau_positive", "parameters.tau_negative")
_OF_VESPO = tuple(f"parameters.{name}_{sign}" for name in ("shape", "rate") for sign in ("positive", "negative"))
OF_OBJECTIVES = (
    "ratio_level",
    "clip_low",
    "clip_high",
    "keep_low",
    "keep_high",
    "dual_clip",
    "cap_low",
    "cap_high",
    *_OF_SAPO,
    *_OF_VESPO,
)
"""The keys that an objective may read."""

READS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "advantage_mean": {
        "none": (),
        "group": ("leave_one_out", "best_of"),
        "batch": ("leave_one_out",),
        "greedy": (),
        "moving": ("baseline_decay",),
        "tracked": ("baseline_decay",),
        OWN: (),
    },
    "advantage_std": {
        "none": (),
        "group": ("std_unbiased",),
        "batch": ("std_unbiased",),
        "advantages": ("std_unbiased",),
    },
    "credit": {
        "completion": (),
        "turn": ("gamma_turn", "turn_baseline", "turn_compared", "turn_weight"),
        "discounted": ("gamma",),
        "optimal": ("gamma",),
        "gae": ("gamma", "lam", "lam_length_factor", "critic"),
    },
    "objective": {
        "clip": ("ratio_level", "clip_low", "clip_high", "keep_low", "keep_high", "dual_clip"),
        "cispo": ("ratio_level", "cap_low", "cap_high"),
        "reinforce": (),
        "importance": ("ratio_level",),
        "sapo": ("ratio_level", *_OF_SAPO),
        "vespo": ("ratio_level", *_OF_VESPO),
        "topr": ("ratio_level", "cap_low", "cap_high"),
        "gmpo": ("clip_low", "clip_high"),
        "dppo_tv": ("clip_low", "clip_high", "cap_high"),
        "dppo_kl": ("clip_low", "clip_high", "cap_high"),
        OWN: OF_OBJECTIVES,  # a call shows which of them it reads: algorithms.own
    },
    "old_logprobs": {
        "learner": (*_OF_THE_GAP, "old_kl_limit"),
        "interpolated": _OF_THE_GAP,  # this old policy follows the current one
        "rollout": ("old_kl_limit",),  # the old policy is the one that sampled
    },
    "correction.mode": {"none": (), **dict.fromkeys(("truncate", "mask", "band"), _OF_RATIOS), "reject": _CORRECTION},
    "tokens.choose": {
        "all": (),
        "top_entropy": ("tokens.share",),
        "clip_cov": ("tokens.share", "parameters.covariance_low", "parameters.covariance_high"),
        "kl_cov": ("tokens.share", "parameters.kl_cov"),
        "second_moment": ("parameters.second_moment",),
    },
    "kl.coefficient": {OFF: (), ON: _KL},
    "kl.placement": {"loss": ("kl.importance_weighted",), "token_reward": (), "completion_reward": ()},
    "kl.estimator": dict.fromkeys(("k1", "k2", "k3", "abs"), ("kl.importance_weighted",))
    | {"top_k": ("kl.top_k", "kl.beta")},
    "critic.backbone": {
        "own": ("critic.path", "critic.learning_rate", "critic.only_steps"),
        "policy": ("critic.coefficient",),
    },
    "overlong_buffer": {OFF: (), ON: ("overlong_factor",)},
    "whiten": {OFF: (), ON: ("whiten_of",)},
}
"""For each choice of the ``algorithm`` section and each of its values: the keys and inner sections that it reads."""

PREFERENCE_READS = (
    "preference",
    "kl",  # the reference; no coefficient: _kl_problems
    "unfinished_reward",
    "overlong_buffer",
    "overlong_factor",
    "old_logprobs",
    *(key for keys in section_keys("algorithm").values() for key in keys.model_fields),
)
"""The keys that training on pairs (``preference.beta``) reads, all of features among them, whose rules are their own;
without it, any key may be read."""


def unread_of_algorithm(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields keys and sections of ``algorithm`` that nothing reads, and why. The first reason of a key counts."""
    yield from _unread_by_preference(config.algorithm)
    yield from _unread_by_choices(config.algorithm)
    yield from _useless_keys(config)


def problems_of_own_objective(row: AlgorithmSection, read: Collection[str]) -> list[str]:
    """Returns a line for each set key that ``objective=package.module:name`` could read, but is not in ``read``."""
    leaves, reason = dict(set_leaves("algorithm", row)), f"algorithm.objective={row.objective} does not read it"
    unread = [f"algorithm.{key}" for key in OF_OBJECTIVES if key not in read]
    return [does_nothing(name, leaves[name], reason) for name in unread if name in leaves]


def _unread_by_preference(a: AlgorithmSection) -> Iterator[tuple[str, str]]:
    if not a.pairs:
        return
    for name, _ in set_leaves("algorithm", a):
        if not any(contains_leaf(name, f"algorithm.{key}") for key in PREFERENCE_READS):
            yield name, f"algorithm.preference.beta={a.preference.beta} trains on pairs and does not read it"


def _unread_by_choices(a: AlgorithmSection) -> Iterator[tuple[str, str]]:
    for choice, reads in READS.items():
        value = attrgetter(choice)(a)
        chosen = str(value) if value in reads else OWN if OWN in reads else (ON if value else OFF)
        for key in {key for keys in reads.values() for key in keys} - set(reads[chosen]):
            readers = _named(choice, [name for name, keys in reads.items() if key in keys], value)
            yield f"algorithm.{key}", f"algorithm.{choice}={as_given(value)} does not read it; {readers} does"


def _named(choice: str, values: list[str], instead_of: object) -> str:
    """``algorithm.objective=cispo or topr``."""
    if values == [ON]:
        return f"algorithm.{choice}=true" if instead_of is False else f"algorithm.{choice} above 0"
    return f"algorithm.{choice}={' or '.join(values)}"


def _useless_keys(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields keys of the algorithm that several choices together make useless, and why."""
    a = config.algorithm
    rewards = source_rewards(config.data, config.reward, config.environment).values()
    parts = {frozenset(name for name, part in one.parts.items() if part.weight) for one in rewards}
    apart = a.advantage_mean == "batch" and len(parts) > 1  # the mean of a part is over those of its sources alone
    if a.advantage_std == "none" and ":" not in a.advantage_mean and not apart:
        yield (
            "algorithm.advantage_of",
            "with advantage_std=none, comparing parts gives the same result as comparing sums (advantage_std=group "
            "differs)",
        )


def problems_of_job(config: RunConfig) -> list[str]:
    """Returns a line for each set key that the job does not read, and for data in a form that it does not train on."""
    given = dict(set_leaves("", config))
    for key, source in data_sources(config.data).items():
        given |= set_leaves(key, source) if key != "data" else {}
    unread = sorted(name for name in given if not _read(config.kind, name))
    return [*(_not_read(name, given[name], config.job) for name in unread), *_form_problems(config)]


def _not_read(name: str, leaf: Leaf, job: str) -> str:
    readers = " or ".join(f"job={other}" for other, kind in JOBS.items() if _read(kind, name))
    return (
        f"{name}={as_given(leaf.value)}: job={job} does not read it, {readers} may; leave it out, or set it to "
        f"its default, {as_given(leaf.default)}"
    )


def _form_problems(config: RunConfig) -> Iterator[str]:
    """Yields problems of sources with rows of another form than the job's, or with the question as an answer."""
    demonstrated = config.environment.function is not None  # a warm start then learns its demonstrations
    learns = not config.kind.samples or (config.warm_start.steps > 0 and not demonstrated)
    for key, source in data_sources(config.data).items():
        if not isinstance(source, FileKeys):
            if config.kind.rows == "labels":
                yield f"job={config.job} {key}.type={source.type}: its problems have no labels; read files"
            continue
        is_answer = source.prompt_field in (source.answer_field, source.fields["rejected"])
        shown = config.algorithm.demonstration_gamma is not None and source.fields["demonstration"] is None
        if (learns or shown) and source.fields["messages"] is None and is_answer:
            yield (
                f"{key}.fields.prompt={source.prompt_field!r} is also the field of an answer, so a model would "
                f"learn to repeat the question; name both fields. {TURNS_IN_TEXT}"
            )
        if config.kind.rows == "pairs" and source.fields["rejected"] is None:
            yield (
                f"job={config.job} trains on pairs of answers, and {key}.fields.rejected is not given; set it to the "
                f"field of the worse answer ({key}.fields.answer={source.answer_field} is the better one)"
            )
        if config.kind.rows == "labels" and source.fields["rejected"] is not None:
            yield (
                f"{key}.fields.rejected={source.fields['rejected']}: dpo.loss={config.dpo.loss} trains on one "
                "labeled answer per row; leave it out, or set another loss"
            )


def _read(kind: JobKind, leaf: str) -> bool:
    """True if jobs of the kind read a key; a source of a mixture has the keys of ``data``."""
    names = [leaf, f"data.{leaf.split('.', 3)[-1]}"] if leaf.startswith("data.sources.") else [leaf]
    unread = any(contains_leaf(one, key) for key in kind.unread for one in names)
    return not unread and (kind.reads is None or any(contains_leaf(one, key) for key in kind.reads for one in names))


def problems_of_unread_keys(config: RunConfig) -> Iterator[str]:
    """Returns a line for each set key that only code finds unread, with what would read it."""
    sections: list[tuple[str, Section]] = [("model", config.model), ("algorithm", config.algorithm)]
    sections += [*_rewards(config), *((name, getattr(config, name)) for name in ("sandbox", "data", "eval"))]
    given = {name: leaf for key, section in sections for name, leaf in set_leaves(key, section)}
    reasons: dict[str, str] = {}
    for key, reason in itertools.chain(
        unread_of_algorithm(config), _unread_reward_keys(config), _unread_data_keys(config)
    ):
        for name in (name for name in given if contains_leaf(name, key)):
            reasons.setdefault(name, reason)
    return (does_nothing(name, leaf, reasons[name]) for name, leaf in given.items() if name in reasons)


def _unread_data_keys(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys of templates, programs, leaks and temperatures that nothing reads, each with the reason."""
    sources = (*data_sources(config.data).values(), *config.eval.data_of_sets.values())
    shown = any(isinstance(one, FileKeys) and (one.chat_template or one.fields["messages"]) for one in sources)
    if not shown and all(one.template != "chat" for one in config.environments.values()):
        reason = "no data has chat_template=true or fields.messages, and no environment has template=chat"
        yield "model.template_variables", reason
    tested = any("tests" in its.functions.values() for _, its in _rewards(config))
    if not tested and not config.environments:
        yield "sandbox", "only reward.function=tests and environments run programs"
    if isinstance(config.data, ArithmeticData) and not config.eval.data_of_sets:
        yield "data.on_leak", "data.type=arithmetic never trains on a held-out problem"
    if config.eval.sets and all(one.temperature is not None for one in config.eval.sets.values()):
        yield "eval.temperature", "every set of eval.sets has its own temperature"


def _unread_reward_keys(config: RunConfig) -> Iterator[tuple[str, str]]:
    sources = config.data.sources.values() if isinstance(config.data, MixtureData) else ()
    sets = [one for one in config.eval.sets.values() if not isinstance(one.data, RunData)]
    if sources and all(one.reward or one.environment for one in (*sources, *sets)):
        judged = "data.sources and every set of eval.sets with its own data" if sets else "data.sources"
        yield "reward", f"every source of {judged} has its own reward or environment"
    for above, its in _rewards(config):
        for section, does in _reward_options(its).items():
            if not does:
                reason = f"no reward in {above}.function={its.function} or {above}.parts reads it"
                yield f"{above}.{section}", reason


def _rewards(config: RunConfig) -> list[tuple[str, RewardSection]]:
    """The run's reward and those of sources and sets, each with the key of its section."""
    return [("reward", config.reward), *((reward_key(name), reward) for name, reward in config.own_rewards.items())]


def _reward_options(reward: RewardSection) -> dict[str, bool]:
    """Returns for each inner section of a reward whether one of the reward's functions reads it."""
    names = reward.functions.values()
    return {
        "format": "format" in names,
        "length": "length" in names,
        "tests": "tests" in names,
        "http": any(name.startswith(("http://", "https://")) for name in names),
        "model": any(name.startswith(("hf:", RANKS)) for name in names),
        "model.label": any(name.startswith("hf:") for name in names),
    }
