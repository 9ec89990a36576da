"""Lists the keys that each choice reads, and refuses a set key that no choice of the configuration reads.

A key is set if it differs from its default, so that a saved configuration, which holds every key, stays valid. A test
checks the table: each key changes what a step does, or is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel

from rl_megatron.config.sections.data import FileKeys, MixtureData, data_sources
from rl_megatron.config.sections.jobs import JOBS, JobKind
from rl_megatron.config.sections.reward import reward_key
from rl_megatron.config.sections.services import SERVICE
from rl_megatron.config.sections.weights import TRANSPORT_KINDS

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.algorithm import AlgorithmSection
    from rl_megatron.config.sections.reward import RewardSection

ON, OFF = "on", "off"
"""The states of a choice that is a number: off is 0 or null, on is any other."""
OWN = "package.module:name"
"""The state of a choice that is code of the user's own."""
_CORRECTION = ("correction.level", "correction.high", "correction.of", "correction.normalise")
_OF_RATIOS = (*_CORRECTION, "correction.low")
_OF_THE_GAP = ("correction.mode", "correction.times", "correction.veto")
_KL = tuple(
    f"kl.{key}"
    for key in ("placement", "estimator", "importance_weighted", "target", "horizon", "top_k", "beta", "teachers")
)
_OF_OBJECTIVES = (
    "ratio_level",
    "clip_low",
    "clip_high",
    "dual_clip",
    "cap_low",
    "cap_high",
    "tau_positive",
    "tau_negative",
    "shape_positive",
    "shape_negative",
    "rate_positive",
    "rate_negative",
)

READS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "advantage_mean": {
        "none": (),
        "group": ("leave_one_out",),
        "batch": ("leave_one_out",),
        "greedy": (),
        "moving": ("baseline_decay",),
        "tracked": ("baseline_decay",),
        OWN: (),
    },
    "advantage_std": {
        "none": (),
        "group": ("std_eps", "std_unbiased"),
        "batch": ("std_eps", "std_unbiased"),
        "advantages": ("std_eps", "std_unbiased"),
    },
    "credit": {
        "completion": (),
        "turn": ("gamma_turn", "turn_baseline"),
        "discounted": ("gamma",),
        "gae": ("gamma", "lam", "lam_length_factor", "critic"),
    },
    "objective": {
        "clip": ("ratio_level", "clip_low", "clip_high", "dual_clip"),
        "cispo": ("ratio_level", "cap_low", "cap_high"),
        "reinforce": (),
        "importance": ("ratio_level",),
        "sapo": ("ratio_level", "tau_positive", "tau_negative"),
        "vespo": ("ratio_level", "shape_positive", "shape_negative", "rate_positive", "rate_negative"),
        "topr": ("ratio_level", "cap_low", "cap_high"),
        "gmpo": ("clip_low", "clip_high"),
        "dppo_tv": ("clip_low", "clip_high", "cap_high"),
        "dppo_kl": ("clip_low", "clip_high", "cap_high"),
        OWN: _OF_OBJECTIVES,  # which of them is known once it is called: algorithms.own
    },
    "aggregation": {
        "token_mean": (),
        "seq_mean_token_mean": (),
        "seq_mean_token_sum": (),
        "seq_mean_token_sum_norm": ("max_length",),
        "prompt_mean": (),
    },
    "old_logprobs": {
        "learner": (*_OF_THE_GAP, "old_kl_limit"),
        "interpolated": _OF_THE_GAP,  # this old policy follows the current one
        "rollout": ("old_kl_limit",),  # the old policy is the one that sampled
    },
    "correction.mode": {
        "none": (),
        **dict.fromkeys(("truncate", "mask", "band"), _OF_RATIOS),
        "reject": (*_CORRECTION, "correction.estimator"),
    },
    "tokens.choose": {
        "all": (),
        "top_entropy": ("tokens.share",),
        "clip_cov": ("tokens.share", "tokens.low", "tokens.high"),
        "kl_cov": ("tokens.share", "tokens.kl_coefficient", "tokens.kl_estimator"),
        "second_moment": ("tokens.limit",),
    },
    "kl.coefficient": {OFF: (), ON: _KL},
    "kl.placement": {"loss": ("kl.importance_weighted",), "token_reward": (), "completion_reward": ()},
    "kl.target": {OFF: (), ON: ("kl.horizon",)},
    "kl.estimator": dict.fromkeys(("k1", "k2", "k3", "abs"), ("kl.importance_weighted",))
    | {"top_k": ("kl.top_k", "kl.beta")},
    "critic.backbone": {
        "own": ("critic.path", "critic.learning_rate", "critic.only_steps", "critic.optimizer"),
        "policy": ("critic.coefficient",),
    },
    "entropy_target": {OFF: (), ON: ("entropy_step",)},
    "overlong_buffer": {OFF: (), ON: ("overlong_factor",)},
    "whiten": {OFF: (), ON: ("whiten_mean", "whiten_std")},
}
"""For each choice of the ``algorithm`` section and each of its values: the keys and inner sections that it reads."""

PREFERENCE_READS = (
    "preference_beta",
    "preference_per_token",
    "kl",  # the reference; no coefficient: _kl_problems
    "unfinished_reward",
    "overlong_buffer",
    "overlong_factor",
    "reward_scale",
    "reward_bias",
    "normalise_rewards",
    "reward_clip",
    "whiten_rewards",
    "old_logprobs",
    "routing_replay",
)
"""The keys that DPO (``preference_beta``) reads; without it, any key may be read."""


def problems_of_job(config: RunConfig) -> list[str]:
    """A line for each set key that the job does not read, and for data of another form than it trains on."""
    kind, every = config.kind, dict[str, tuple[object, object]]()
    for name, section in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            every |= _leaves(name, value)
        else:
            every[name] = value, section.get_default(call_default_factory=True)
    for key, source in data_sources(config.data).items():
        every |= {leaf: value for leaf, value in _leaves(key, source) if key != "data"}
    unread = sorted(leaf for leaf, (value, default) in every.items() if value != default and not _read(kind, leaf))
    readers = {leaf: [f"job={name}" for name, other in JOBS.items() if _read(other, leaf)] for leaf in unread}
    found = [
        f"{leaf}={_text(every[leaf][0])}: job={config.job} does not read it, {' or '.join(readers[leaf])} may; leave "
        f"it out, or set it to its default, {_text(every[leaf][1])}"
        for leaf in unread
    ]
    return [*found, *_without_pairs(config)]


def _without_pairs(config: RunConfig) -> Iterator[str]:
    """The sources of a job on pairs that have none."""
    for key, source in data_sources(config.data).items() if config.kind.pairs else ():
        if isinstance(source, FileKeys) and source.rejected_field is None:
            yield (
                f"job={config.job} trains on pairs of answers, and {key}.rejected_field is not given; set it to the "
                f"field of the worse one (of the better one: {key}.answer_field={source.answer_field})"
            )


def _read(kind: JobKind, leaf: str) -> bool:
    """Whether jobs of the kind read a key; a source of a mixture has the keys of ``data``."""
    names = [leaf, f"data.{leaf.split('.')[-1]}"] if leaf.startswith("data.sources.") else [leaf]
    unread = any(_is_in(one, key) for key in kind.unread for one in names)
    return not unread and (kind.reads is None or any(_is_in(one, key) for key in kind.reads for one in names))


def _is_in(leaf: str, key: str) -> bool:
    """Whether the leaf is the key, or in the section of that name."""
    return leaf == key or leaf.startswith(f"{key}.")


def problems_of_unread_keys(config: RunConfig) -> list[str]:
    """A line for each set key that nothing reads: what would read it, and its default."""
    algorithm = dict(_leaves("algorithm", config.algorithm))
    out: dict[str, str] = {}
    for choice, reads in READS.items():
        value = algorithm[f"algorithm.{choice}"][0]
        chosen = str(value) if value in reads else OWN if OWN in reads else (ON if value else OFF)
        for key in {key for keys in reads.values() for key in keys} - set(reads[chosen]):
            readers = [name for name, keys in reads.items() if key in keys]
            for leaf in _set(algorithm, f"algorithm.{key}"):
                out.setdefault(
                    leaf, f"algorithm.{choice}={_text(value)} does not read it, {_named(choice, readers, value)} does"
                )
    if config.algorithm.preference_beta is not None:
        read = {leaf for key in PREFERENCE_READS for leaf in _set(algorithm, f"algorithm.{key}")}
        for leaf in _set(algorithm, "algorithm"):
            if leaf not in read:
                out[leaf] = f"algorithm.preference_beta={config.algorithm.preference_beta} trains on pairs without it"
    rollout, reward = dict(_leaves("rollout", config.rollout)), dict[str, tuple[object, object]]()
    for key, reason in _unread_rollout(config):
        out |= dict.fromkeys(_set(rollout, f"rollout.{key}"), reason)
    for above, its in _rewards(config):
        reward |= _leaves(above, its)
        if config.algorithm.credit != "turn":
            reason = f"algorithm.credit={config.algorithm.credit} compares whole completions, credit=turn their steps"
            out |= dict.fromkeys(_set(reward, f"{above}.steps"), reason)
        for section, does in _reward_options(its).items():
            if not does:
                reason = f"no reward reads it that {above}.function={its.function} or {above}.parts name"
                out |= dict.fromkeys(_set(reward, f"{above}.{section}"), reason)
        if not its.http.retries:
            reason = f"with {above}.http.retries=0 there is no retry to wait for"
            out |= dict.fromkeys(_set(reward, f"{above}.http.backoff_seconds"), reason)
    sources = config.data.sources.values() if isinstance(config.data, MixtureData) else ()
    if sources and all(one.reward or one.environment for one in sources):
        reason = "every source of data.sources has a reward or an environment of its own"
        out |= dict.fromkeys(_set(reward, "reward"), reason)
    variables = "model.template_variables"
    model = {leaf: value for leaf, value in _leaves("model", config.model) if leaf == variables}
    if not _applies_a_template(config):
        reason = "no data has chat_template=true or messages_field, and no environment has template=chat"
        out |= dict.fromkeys(_set(model, variables), reason)
    for leaf, reason in _without_effect(config):
        for _ in _set(algorithm, leaf):
            out.setdefault(leaf, reason)
    train = dict(_leaves("train", config.train))
    if reason := _groups_are_whole_anyway(config):
        out |= dict.fromkeys(_set(train, "train.whole_groups"), reason)
    weights = dict(_leaves("weights", config.weights))
    for key, reason in _unread_weights(config):
        out |= dict.fromkeys(_set(weights, f"weights.{key}"), reason)
    sandbox = dict(_leaves("sandbox", config.sandbox))
    tested = any("tests" in its.functions.values() for _, its in _rewards(config))
    if not tested and not config.environments:
        out |= dict.fromkeys(_set(sandbox, "sandbox"), "only reward.function=tests and environments run programs")
    environment = dict(_leaves("environment", config.environment))
    if config.environment.function is None:
        out |= dict.fromkeys(_set(environment, "environment"), "without environment.function there is no environment")
    every = model | algorithm | rollout | reward | train | weights | sandbox | environment
    return [_does_nothing(leaf, *every[leaf], out[leaf]) for leaf in every if leaf in out]


def _groups_are_whole_anyway(config: RunConfig) -> str:
    """Why ``train.whole_groups`` can move no completion; empty if it can."""
    if config.train.minibatches == 1:
        return "with train.minibatches=1 a minibatch is the whole batch"
    if config.algorithm.preference_beta is not None:
        return f"algorithm.preference_beta={config.algorithm.preference_beta} keeps each group's pair together"
    return "with rollout.group_size=1 a group is one completion" if config.rollout.group_size == 1 else ""


def problems_of_own_objective(row: AlgorithmSection, read: Collection[str]) -> list[str]:
    """A line for each set key that ``objective=package.module:name`` could have read, but is not among ``read``."""
    algorithm, reason = dict(_leaves("algorithm", row)), f"algorithm.objective={row.objective} does not read it"
    unread = (f"algorithm.{key}" for key in _OF_OBJECTIVES if key not in read)
    return [_does_nothing(leaf, *algorithm[leaf], reason) for key in unread for leaf in _set(algorithm, key)]


def _does_nothing(leaf: str, value: object, default: object, reason: str) -> str:
    return f"{leaf}={_text(value)} does nothing: {reason}; leave it out, or set it to its default, {_text(default)}"


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
        "http": any(name.startswith(("http://", "https://", SERVICE)) for name in names),
        "model": any(name.startswith("hf:") for name in names),
    }


def _applies_a_template(config: RunConfig) -> bool:
    """Whether any part of the run makes tokens by the tokenizer's chat template."""
    sources = (*data_sources(config.data).values(), *config.eval.data_of_sets.values())
    shown = any(isinstance(one, FileKeys) and (one.chat_template or one.messages_field) for one in sources)
    return shown or any(one.template == "chat" for one in config.environments.values())


def _unread_rollout(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys and sections of ``rollout`` that nothing reads, and why."""
    rollout = config.rollout
    if rollout.dynamic_sampling == OFF:
        yield "max_refills", "rollout.dynamic_sampling=off samples one batch per step"
    if not rollout.served:
        for key in ("python", "server"):
            yield key, f"rollout.engine={rollout.engine} samples in the learner's processes, and only servers read it"
    elif rollout.embedded:
        for key in ("python", "server.memory_fraction"):
            yield key, f"servers of rollout.engine={rollout.engine} run in the trainer's interpreter, on CPUs"


def _unread_weights(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys of ``weights`` that the transport does not read, and why: the transports to the same engine that do."""
    served, engine = config.rollout.served, f"rollout.engine={config.rollout.engine}"
    read = {"transport", "push", *config.transport.reads(served=served)}
    for key in (key for key in type(config.weights).model_fields if key not in read):
        kinds = (kind for kind in TRANSPORT_KINDS.values() if kind.reaches(served=served))
        readers = " or ".join(kind.name for kind in kinds if key in kind.reads(served=served))
        if readers:
            yield key, f"weights.transport={config.transport.name} does not read it, {readers} does"
        else:
            yield key, f"{engine} samples in the learner's processes, and only servers use it"


def _without_effect(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys of the algorithm that several choices together make useless, and why."""
    a, train = config.algorithm, config.train
    if train.epochs * train.minibatches == 1 and a.old_logprobs == "learner":
        reason = "with train.epochs=1 and train.minibatches=1 the only optimizer step begins at the old policy"
        yield "algorithm.old_kl_limit", reason
    if a.preference_beta is None:
        yield "algorithm.preference_per_token", "without algorithm.preference_beta no pairs are trained on"
    if not a.needs_reference:
        yield "algorithm.kl.reference", "without algorithm.kl.coefficient or preference_beta no reference is loaded"
    if a.advantage_mean == a.advantage_std == "none":
        yield "algorithm.turn_baseline", "without a mean and a std of advantages turns are not compared"
    if a.lam_length_factor is not None and a.critic.lam is not None:
        yield "algorithm.lam", "algorithm.lam_length_factor and algorithm.critic.lam replace it for policy and critic"
    pairs = a.preference_beta is not None
    alone = a.reward_clip is None and (pairs or a.credit != "gae")
    alone = alone and not (a.kl.coefficient > 0 and a.kl.placement != "loss")
    divided, centred = a.advantage_std != "none" or _whitens(a, a.whiten_std), a.advantage_mean in {"group", "batch"}
    if a.whiten_rewards or a.normalise_rewards != "none" or (alone and (pairs or divided)):
        yield "algorithm.reward_scale", "a later comparison of rewards, or division by their std or range, undoes it"
    baseline = a.advantage_mean != "none" and ":" not in a.advantage_mean  # of all but a function of one's own
    for_all = a.credit == "completion" or (a.credit == "discounted" and a.gamma == 1)  # tokens, the same bias
    compared = pairs or baseline or (for_all and _whitens(a, a.whiten_mean))
    if a.whiten_rewards or a.normalise_rewards != "none" or (a.reward_clip is None and compared):
        yield "algorithm.reward_bias", "rewards are compared with one another, and it is in all of them"
    if a.whiten and a.whiten_mean == a.whiten_std == "none":
        yield "algorithm.whiten", "algorithm.whiten_mean and whiten_std are none"
    if alone and (pairs or (divided and centred)):
        yield "algorithm.whiten_rewards", "a later comparison of rewards, or centring and division, undoes it"
    of_group = a.advantage_mean == "group" and a.advantage_std == "group"
    if alone and (pairs or of_group or (a.normalise_rewards == "batch" and divided and centred)):
        yield "algorithm.normalise_rewards", "a later comparison of rewards, or centring and division, undoes it"


def _whitens(a: AlgorithmSection, level: str) -> bool:
    return a.whiten and level != "none"


def _text(value: object) -> str:
    """The value as a user writes it on a command line."""
    if isinstance(value, BaseModel):
        return _text(value.model_dump(mode="json", exclude_defaults=True))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(one)}' for name, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _named(choice: str, values: list[str], instead_of: object) -> str:
    """``algorithm.objective=cispo or topr``."""
    if values == [ON]:
        return f"algorithm.{choice}=true" if instead_of is False else f"algorithm.{choice} above 0"
    return f"algorithm.{choice}={' or '.join(values)}"


def _set(leaves: Mapping[str, tuple[object, object]], key: str) -> list[str]:
    """The key, or all keys of the section ``key``, whose value is not the default."""
    changed = (leaf for leaf, (value, default) in leaves.items() if value is not default and value != default)
    return [leaf for leaf in changed if _is_in(leaf, key)]


def _leaves(name: str, section: BaseModel) -> Iterator[tuple[str, tuple[object, object]]]:
    """Value and default of every key in the section, by the key's full name."""
    for key, default in _defaults(type(section)).items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            yield from _leaves(f"{name}.{key}", value)
        else:
            yield f"{name}.{key}", (value, default)


@functools.cache
def _defaults(section: type[BaseModel]) -> Mapping[str, object]:
    """Made once: pydantic copies a default each time it is asked for one."""
    return {key: field.get_default(call_default_factory=True) for key, field in section.model_fields.items()}
