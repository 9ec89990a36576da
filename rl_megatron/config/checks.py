"""Rules between keys that need code: each function yields a line for each problem, with the keys, why, and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.beside import separate, with_role_keys
from rl_megatron.config.learner_checks import problems as option_problems
from rl_megatron.config.removed import describe_replacement
from rl_megatron.config.sections.data import FileKeys, data_sources, source_rewards
from rl_megatron.config.sections.eval import RunData
from rl_megatron.config.sections.learner import max_padded_length, padded_tokens, sequence_multiple
from rl_megatron.config.sections.reward import reward_key
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.feature import role_models

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig

_RENDERED = "the environment renders the conversation itself, and begins it with the text of the task; set"


def problems_of_options(c: RunConfig) -> Iterator[str]:
    """Yields the problems of the learner's options."""
    yield from option_problems(c.learner)


def problems_of_servers(c: RunConfig) -> Iterator[str]:
    """Yields an error for a folder of weights that some ranks do not see, and for degrees of servers that conflict."""
    server = c.rollout.server
    folder = c.weights.folder
    if c.rollout.served and c.slurm.engines.nodes and folder and folder.is_relative_to(NODE_MEMORY):
        yield (
            f"weights.folder={folder} is in the memory of each node, and the learner's ranks cannot write to "
            f"slurm.engines.nodes={c.slurm.engines.nodes}; give a folder that all nodes see, or leave it out"
        )
    if server.ep not in {1, whole := server.tp * server.dp}:
        yield (
            f"rollout.server.ep={server.ep}: an engine spreads experts over all GPUs of a stage or over none; set "
            f"rollout.server.ep=tp*dp={whole}, or 1"
        )
    if server.ranks % (server.nodes or 1):
        yield (
            f"rollout.server.nodes={server.nodes} does not divide its tp*pp*dp = {server.tp}*{server.pp}*{server.dp} = "
            f"{server.ranks} GPUs; change one of them"
        )


def problems_of_batches(c: RunConfig) -> Iterator[str]:
    """Yields an error for more minibatches than parts of a step, and for sequences longer than a micro-batch."""
    parts, named = c.parts_of_minibatches
    if c.kind.samples and parts < c.train.minibatches:
        yield (
            f"train.minibatches={c.train.minibatches} is more than the {parts} {named}; lower the first or raise the "
            "others"
        )
    longest, pairs = c.longest_sequence, c.kind.rows == "pairs" or c.algorithm.pairs
    wanted, most, dims = 2 * longest if pairs else longest, c.learner.max_tokens_per_micro_batch, c.learner.dims
    multiple = sequence_multiple(dims)
    padded = 2 * padded_tokens(longest, multiple, ())
    if wanted > most:
        what = "pair of the longest sequences, 2 * (" if pairs else "longest sequence, ("
        yield (
            f"learner.max_tokens_per_micro_batch={most} is less than the {what}"
            f"{c.named_longest}) = {wanted}; raise the first or lower the others"
        )
    elif pairs and padded > max_padded_length(most, dims):
        yield (
            f"learner.max_tokens_per_micro_batch={most} is less than the pair of the longest sequences, each "
            f"({c.named_longest}) padded for learner.cp={dims.cp} to a multiple of {multiple}: {padded}; "
            "raise the first or lower the others"
        )


def problems_of_groups(c: RunConfig) -> Iterator[str]:
    """Yields an error if no group gives a gradient, or if dynamic sampling drops groups that give one."""
    a, r = c.algorithm, c.rollout
    size = r.group_size + (a.demonstration_gamma is not None)
    levels = {f"algorithm.{key}={getattr(a, key)}" for key in ("advantage_mean", "advantage_std")}
    over_group, over_batch = (sorted(k for k in levels if k.endswith(e)) for e in ("=group", ("=batch", "=advantages")))
    if a.whiten and a.credit == "completion":
        over_batch.append("algorithm.whiten=true")
    if a.credit == "optimal":
        over_group.append("algorithm.credit=optimal")
    of_turns = a.credit == "turn" and a.turn_baseline != "index"  # one trajectory may have several turns to compare
    compares = not (a.needs_top and a.kl.has_teacher)  # otherwise a teacher trains every token
    if compares and size == 1 and over_group and not a.pairs and not of_turns:
        yield (
            f"rollout.group_size=1 with {', '.join(over_group)}: a group has no second completion to compare with, so "
            "all advantages are 0 and nothing is trained; set rollout.group_size=2 or more, or batch or none for group"
        )
    if compares and size * r.prompts_per_step == 1 and over_batch:
        yield (
            f"rollout.prompts_per_step=1 and rollout.group_size=1 with {', '.join(over_batch)}: the batch has no "
            "second completion to compare with, so all advantages are 0 and nothing is trained; raise one of the two"
        )
    if r.dynamic_sampling != "off" and a.taught_by_equal:
        yield (
            f"rollout.dynamic_sampling={r.dynamic_sampling} drops groups of equal rewards, but "
            f"{', '.join(a.taught_by_equal)} learns from them too; set rollout.dynamic_sampling=off"
        )
    elif r.dynamic_sampling != "off" and size == 1 and not of_turns and (a.levels_equal or not a.own_decides):
        yield (
            f"rollout.dynamic_sampling={r.dynamic_sampling} drops every group of one completion, whose rewards cannot "
            "differ, so nothing is trained; set rollout.group_size=2 or more, or rollout.dynamic_sampling=off"
        )


def check_separate_roles(c: RunConfig) -> Iterator[str]:
    """Yields the problems of the layouts of roles with separate ranks."""
    for role in c.roles.layouts:
        yield from _layout_problems(c, role)


def _layout_problems(c: RunConfig, role: str) -> Iterator[str]:
    """Yields the problems of a role's own layout that the learner's layout does not have."""
    if role not in separate(c) and role not in ("critic", "reference"):
        yield (
            f"roles.layouts.{role}: no teacher of algorithm.kl.teachers or reward_models with its own ranks has "
            f"this role; allowed: {', '.join(role_models(c)) or 'none'}"
        )
    elif role not in separate(c):
        yield (
            f"roles.layouts.{role}, but roles.{role}=learner: the {role} is on the learner's ranks, in their layout; "
            f"set roles.{role}=separate, or leave roles.layouts.{role} out"
        )
    known = set(option_problems(c.learner))
    yield from (with_role_keys(c, role, line) for line in option_problems(c.role_learner(role)) if line not in known)


def problems_of_limits(c: RunConfig) -> Iterator[str]:
    """Yields an error if ``top_p`` or ``top_k`` makes ratios of learner to engine useless."""
    a, one, least = c.algorithm, c.algorithm.correction, 0.0 if c.rollout.top_k else c.rollout.top_p
    near_one = one.level == "sequence" and one.mode in {"mask", "band"} and one.low > least
    in_rewards = a.kl.coefficient > 0 and a.kl.placement != "loss"
    no_ratio = a.objective == "reinforce" and a.old_kl_limit is None and a.tokens.choose != "kl_cov" and not in_rewards
    readers = {
        f"algorithm.old_logprobs={a.old_logprobs}": a.old_logprobs != "learner" and not (a.pairs or no_ratio),
        f"algorithm.correction.level={one.level}": one.mode != "none" and (one.level == "product" or near_one),
    }
    limited = c.rollout.limits and c.kind.samples and not c.limits_are_shared
    for key in (key for key, reads in readers.items() if reads and limited):
        yield (
            f"{c.rollout.limits} with {key}: the engine's log-probs are of the tokens that it keeps and the learner's "
            "of all, so each token's ratio is too small by the probability of the rest, and a sequence's by that of "
            "all its tokens; use sampling masks (docs/engines.md), or set rollout.top_p=1 and rollout.top_k=0, or "
            "algorithm.old_logprobs=learner without correction"
        )


def problems_of_rewards(c: RunConfig) -> Iterator[str]:
    """Yields an error for rewards without a weight or parts to compare, and for groups too small for best_of."""
    yield from _missing_rewards(c)
    a, size = c.algorithm, c.rollout.group_size
    for key, section in source_rewards(c.data, c.reward, c.environment).items():
        if not c.kind.samples or a.advantage_of != "parts":
            break
        if not section.parts:
            yield (
                f"algorithm.advantage_of=parts with {key}.function={section.function}: this reward has no parts to "
                f"compare; give several in {key}.parts, or set advantage_of=sum"
            )
        if isinstance(section.on_error, float):
            yield (
                f"algorithm.advantage_of=parts with {key}.on_error={section.on_error:g}: that number replaces "
                f"the sum, and a completion with a failed reward has no parts; set {key}.on_error=drop or fail"
            )
    least = a.best_of + (not a.leave_one_out) - (a.demonstration_gamma is not None)
    if c.kind.samples and a.best_of > 1 and size < least:
        yield (
            f"algorithm.best_of={a.best_of} with rollout.group_size={size} and leave_one_out="
            f"{str(a.leave_one_out).lower()}: a group has nothing to compare, so nothing is trained; set "
            f"rollout.group_size={least} or more, or lower algorithm.best_of"
        )


def _missing_rewards(c: RunConfig) -> Iterator[str]:
    """Yields an error for rewards without a weight if no other model scores completions either."""
    kl = c.algorithm.kl
    compared = c.algorithm.needs_top or (kl.coefficient > 0 and kl.placement != "loss")
    if compared and kl.has_teacher:
        return
    why, instead = "no KL is part of the reward", "algorithm.kl, as algorithm=distill and gkd do"
    if compared:
        why = "the policy is its own reference when training begins, so nothing is trained"
        instead = "algorithm.kl.reference to a teacher's folder, or algorithm.kl.teachers"
    keys = {"reward": c.reward} | {reward_key(name): one for name, one in c.source_rewards.items()}
    for key, section in keys.items():
        if section.only_records:
            yield (
                f"{key}.parts: the weights of {', '.join(section.parts)} are all 0, and {why}; give one a weight, or "
                f"set {instead}"
            )


def problems_of_environments(c: RunConfig) -> Iterator[str]:
    """Yields an error for removed functions, prompts that are already rendered, lengths and turns that do not fit the
    environment, and demonstrations that are named twice."""
    for key, one in c.environments.items():
        if text := describe_replacement("environment.function", one.function):
            yield f"{key}.function={one.function!r}: must be {text}"
    yield from _rendered(c)
    buffer, most = c.algorithm.overlong_buffer, c.max_sampled
    if c.kind.samples and buffer >= max(1, most):
        limit = "environment.max_tokens" if "environment" in c.training_environments else "rollout.max_new_tokens"
        yield (
            f"algorithm.overlong_buffer={buffer:g} is not below {limit}={most}: every length would get a penalty; "
            "lower the first (below 1 it is a share, for example 0.2), or raise the second"
        )
    in_steps = any(one.steps for one in (c.reward, *c.source_rewards.values()))
    if c.algorithm.credit == "turn" and not in_steps and not c.training_environments:
        yield (
            "algorithm.credit=turn without environment.function or reward.steps=true: a completion is one turn; set "
            "algorithm.credit=completion, or one of these two keys"
        )
    for key, source in data_sources(c.data).items() if c.algorithm.demonstration_gamma is not None else ():
        if isinstance(source, FileKeys) and source.fields["demonstration"] == source.answer_field:
            yield (
                f"{key}.fields.demonstration={source.fields['demonstration']!r} is {key}.fields.answer, "
                "the default; leave it out"
            )


def _rendered(c: RunConfig) -> Iterator[str]:
    """Yields an error if a chat template renders problems before an environment does so."""
    for name, one in c.eval.sets.items():
        if one.environment is None:
            continue
        sources = data_sources(c.data) if isinstance(one.data, RunData) else {f"eval.sets.{name}.data": one.data}
        for key, source in sources.items():
            if isinstance(source, FileKeys) and source.chat_template:
                yield (
                    f"eval.sets.{name}.environment.function={one.environment.function} with {key}.chat_template=true: "
                    f"{_RENDERED} {key}.chat_template=false"
                )
    for led, environment in c.training_environments.items():
        for key, source in data_sources(c.data).items():
            its = f"{key}.environment" if f"{key}.environment" in c.environments else "environment"
            if its == led and isinstance(source, FileKeys) and source.chat_template:
                yield (
                    f"{led}.function={environment.function} with {key}.chat_template=true: {_RENDERED} "
                    f"{key}.chat_template=false"
                )


def problems_of_keeping(c: RunConfig) -> Iterator[str]:
    """Yields an error if checkpoints and evaluations are at different steps, or a profile is after the last step."""
    every = c.checkpoint.every
    if c.checkpoint.keep_best and every and c.eval.mode == "blocking" and (not c.eval.every or every % c.eval.every):
        yield (
            f"checkpoint.keep_best={c.checkpoint.keep_best} compares eval/accuracy, which is measured every "
            f"eval.every={c.eval.every} steps, but checkpoints are written every checkpoint.every={every} steps; make "
            "the second a multiple of the first"
        )
    steps = c.profile.steps
    if steps and max(steps) > c.train.steps and c.written_epochs is None:
        yield f"profile.steps has {max(steps)}, but train.steps={c.train.steps}; leave out the later steps"
