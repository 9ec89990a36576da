"""Rules of what runs beside the learner's ranks: teachers, reward models, and roles with ranks of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.config.sections.learner import RoleLayoutSection
from rl_megatron.config.sections.reward import RANKS, REWARD, reward_key
from rl_megatron.config.sections.teachers import ANOTHER_FIELD, TEACHER, TeacherSection, teacher_role
from rl_megatron.options.table import problems as option_problems

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def taught_on_ranks(c: RunConfig) -> dict[str, TeacherSection]:
    """The teachers that have ranks of their own, by their roles."""
    teachers = c.algorithm.kl.teachers if c.kind.samples else {}
    return {teacher_role(name): one for name, one in teachers.items() if one.server is None and one.path is not None}


def taught_by_policy(c: RunConfig) -> dict[str, TeacherSection]:
    """The teachers that are the policy itself, by their roles."""
    teachers = c.algorithm.kl.teachers if c.kind.samples else {}
    return {teacher_role(name): one for name, one in teachers.items() if one.path is None}


def reference_follows(c: RunConfig) -> bool:
    """Whether the reference is a moving average of the policy."""
    return c.needs_reference and c.kind.samples and c.algorithm.kl.follow_rate is not None


def with_own_prompt(c: RunConfig) -> dict[str, TeacherSection]:
    """The teachers that read a prompt of their own, by their names."""
    teachers = c.algorithm.kl.teachers if c.kind.samples else {}
    return {name: one for name, one in teachers.items() if one.prompt is not None}


def longest_read(c: RunConfig, role: str) -> tuple[str, int]:
    """The keys that give the longest sequence that the model of ``role`` reads, and its tokens."""
    for name, one in c.algorithm.kl.teachers.items():
        if teacher_role(name) == role and one.max_prompt_tokens is not None:
            before = f"algorithm.kl.teachers.{name}.max_prompt_tokens={one.max_prompt_tokens}"
            behind = c.named_longest.removeprefix(f"rollout.max_prompt_tokens={c.rollout.max_prompt_tokens}")
            if not one.reads_another:
                return before + behind, one.max_prompt_tokens + c.most_sampled
            longest = one.max_prompt_tokens + 2 * c.most_sampled
            if longest > c.longest_sequence:  # which it reads where there is no other completion to show
                return before + 2 * behind, longest
    return c.named_longest, c.longest_sequence


def reward_model_roles(c: RunConfig) -> dict[str, str]:
    """The names of the reward models on ranks, by their roles."""
    return {f"{REWARD}{name}": name for name in c.reward_models} if c.kind.samples else {}


def separate(c: RunConfig) -> tuple[str, ...]:
    """The roles with ranks of their own, in the order of a job's nodes."""
    return (*c.roles.separate, *taught_on_ranks(c), *reward_model_roles(c))


def frozen_folders(c: RunConfig) -> dict[str, tuple[Path | None, str]]:
    """By the role of each frozen model that ranks hold: its Hugging Face folder, None for the model that training
    starts from, and the folder's key."""
    of_teachers = {
        role: (one.path, f"algorithm.kl.teachers.{role.removeprefix(TEACHER)}.path")
        for role, one in taught_on_ranks(c).items()
    }
    of_rewards = {
        role: (c.reward_models[name].path, f"reward_models.{name}.path") for role, name in reward_model_roles(c).items()
    }
    return ({"reference": (c.reference, c.reference_key)} if c.needs_reference else {}) | of_teachers | of_rewards


def problems_of_reward_models(c: RunConfig) -> Iterator[str]:
    """A line for each reward model on ranks that nobody asks, or that is asked and not there or too small."""
    if not c.kind.samples:
        return
    rewards = {"reward": c.reward} | {reward_key(name): one for name, one in c.own_rewards.items()}
    named = [(key, name) for key, one in rewards.items() for name in one.functions.values() if name.startswith(RANKS)]
    asked = {name.removeprefix(RANKS): key for key, name in named}
    for name in sorted(asked.keys() - set(c.reward_models)):
        known = ", ".join(c.reward_models) or "none"
        yield f"{asked[name]}.function={RANKS}{name:.80}: reward_models has {known}; give reward_models.{name:.80}.path"
    for name in sorted(set(c.reward_models) - asked.keys()):
        yield f"reward_models.{name}: no reward asks it; set reward.function={RANKS}{name}, or leave it out"
    yield from _longer_than_a_micro_batch(c)


def _longer_than_a_micro_batch(c: RunConfig) -> Iterator[str]:
    """A line for each set whose completions a reward model on ranks would be shown in part; training's fit."""
    before, most = c.rollout.max_prompt_tokens, c.learner.max_tokens_per_micro_batch
    of_training = {"reward": c.reward} | {reward_key(name): one for name, one in c.source_rewards.items()}
    for name, one in c.eval.sets.items():
        if (one.environment or c.environment).function is not None:
            continue
        new = one.max_new_tokens or c.rollout.max_new_tokens
        judges = of_training if one.reward is None else {reward_key(f"eval.sets.{name}"): one.reward}
        for key, section in judges.items():
            ranked = any(function.startswith(RANKS) for function in section.functions.values())
            if ranked and (longest := min(before + new, section.model.max_tokens or before + new)) > most:
                yield (
                    f"learner.max_tokens_per_micro_batch={most} is less than the {longest} tokens that reward_models "
                    f"score of rollout.max_prompt_tokens={before} and eval.sets.{name}.max_new_tokens={new}; raise the "
                    f"first, or set {key}.model.max_tokens={most}, so that they read the last ones"
                )


def problems_of_teachers(c: RunConfig) -> Iterator[str]:
    """A line for each reason why the teachers cannot judge what is sampled."""
    kl, key = c.algorithm.kl, "algorithm.kl.teachers"
    if not kl.teachers:
        return
    if kl.reference is not None:
        yield f"algorithm.kl.reference={kl.reference} and {key} ({', '.join(kl.teachers)}): both judge; keep one"
    if c.algorithm.pairs:
        yield f"{key} with algorithm.preference.beta: pairs have a reference of the run, or none; leave {key} out"
    if kl.follow_rate is not None and not taught_by_policy(c):
        yield (
            f"algorithm.kl.follow_rate={kl.follow_rate:g} with {key} ({', '.join(kl.teachers)}): none of them is the "
            "policy's moving average, as each has a path; leave follow_rate out, or a teacher's path"
        )
    if c.rollout.temperature != 1 and (served := [name for name, one in kl.teachers.items() if one.server is not None]):
        yield (
            f"{key}.{served[0]}.server with rollout.temperature={c.rollout.temperature:g}: servers tell log-probs of "
            "prompts at a temperature of 1; set rollout.temperature=1, or leave server out, so that ranks hold it"
        )
    known = c.source_names
    for name, one in kl.teachers.items():
        for source in one.sources:
            if source not in known:
                yield f"{key}.{name}.sources names {source!r:.80}; data.sources has {', '.join(known) or 'none'}"
    for source in known or ("",):
        of = [name for name, one in kl.teachers.items() if not one.sources or source in one.sources]
        if not of:
            yield f"{key}: none judges the prompts of data.sources.{source}; name it in one's sources"
        if len(of) > 1 and kl.estimator != "k1":
            yield (
                f"{key}: {', '.join(of)} judge the same prompts, and estimator={kl.estimator} of several is no "
                "divergence from any of them; set algorithm.kl.estimator=k1, whose weighted sum is, or one teacher"
            )
    for name, one in with_own_prompt(c).items():
        yield from _of_own_prompt(c, name, one)


def _of_own_prompt(c: RunConfig, name: str, one: TeacherSection) -> Iterator[str]:
    """A line for each reason why a teacher cannot read what is sampled behind a prompt of its own."""
    key = f"algorithm.kl.teachers.{name}"
    for led, section in c.training_environments.items():
        source = led.removeprefix("data.sources.").removesuffix(".environment")
        if led == "environment" or not one.sources or source in one.sources:
            yield (
                f"{key}.prompt with {led}.function={section.function}: an environment writes its prompts itself, so "
                f"nothing says what to put in their place; leave {key}.prompt out, or name sources of single "
                f"completions in {key}.sources"
            )
    if one.reads_another and c.rollout.group_size == 1:
        yield (
            f"{key}.prompt has {{{ANOTHER_FIELD}}} with rollout.group_size=1: no group has another completion; raise "
            "group_size, or leave it out"
        )
    role, most = teacher_role(name), c.learner.max_tokens_per_micro_batch
    named, longest = longest_read(c, role)
    if one.server is None and longest > most:
        yield (
            f"learner.max_tokens_per_micro_batch={most} is less than the longest sequence that {role} reads, ({named}) "
            f"= {longest}; raise the first or lower the others"
        )


def problems_of_separate(c: RunConfig) -> Iterator[str]:
    """A critic or a reference with ranks of its own: their layout, and nodes for them."""
    slurm, needed = c.slurm, {"critic": c.algorithm.needs_critic, "reference": c.needs_reference}
    if reference_follows(c) and "reference" in c.roles.separate:
        yield (
            f"algorithm.kl.follow_rate={c.algorithm.kl.follow_rate:g} with roles.reference=separate: a reference that "
            "follows the policy takes its weights from the same ranks; set roles.reference=learner, or leave "
            "follow_rate out"
        )
    for role in c.roles.separate:
        if not needed[role]:
            yield f"roles.{role}=separate, but the algorithm has no {role}; set roles.{role}=learner"
        own = slurm.alone(role)
        if not slurm.heterogeneous and own.nodes not in {0, fill := _nodes_filled(c, role)}:
            ranks = (
                f"{c.learner_of(role).dims.world_size} ranks, which fill {fill} of the learner's nodes"
                if role in c.roles.layouts
                else f"as many ranks as the learner on slurm.nodes={slurm.nodes}"
            )
            yield (
                f"slurm.{role}.nodes={own.nodes}, but a separate {role} has {ranks}, and nodes are alike; leave it "
                "out, or set slurm.heterogeneous=true"
            )
    for role in needed:
        own = slurm.alone(role)
        if own.shaped and not slurm.heterogeneous:
            yield f"slurm.{role} requests nodes unlike the learner's; set slurm.heterogeneous=true"
        if (own.shaped or own.nodes) and role not in c.roles.separate:
            yield f"slurm.{role} requests nodes, but roles.{role}=learner; set roles.{role}=separate"
    for role in c.roles.layouts:
        yield from _of_layout(c, role)


def _of_layout(c: RunConfig, role: str) -> Iterator[str]:
    """What the layout of a role's own ranks breaks, and the learner's does not."""
    if role not in separate(c) and role not in ("critic", "reference"):
        yield (
            f"roles.layouts.{role}: no teacher of algorithm.kl.teachers, and none of reward_models, that ranks hold "
            f"has this role; allowed: {', '.join((*taught_on_ranks(c), *reward_model_roles(c))) or 'none'}"
        )
    elif role not in separate(c):
        yield (
            f"roles.layouts.{role}, but roles.{role}=learner: the learner's ranks hold such a {role}, in their layout; "
            f"set roles.{role}=separate, or leave roles.layouts.{role} out"
        )
    known = set(option_problems(c.learner))
    yield from (in_words_of(c, role, line) for line in option_problems(c.learner_of(role)) if line not in known)


def in_words_of(c: RunConfig, role: str, text: str) -> str:
    """``text``, which names keys of the learner's layout, with the keys of the role's own where it has one."""
    if role not in c.roles.layouts:
        return text
    keys = "|".join(RoleLayoutSection.model_fields)
    return re.sub(rf"\blearner(?=:|\.({keys})\b)", f"roles.layouts.{role}", text)


def nodes_of_role(c: RunConfig, role: str) -> int:
    """The number of nodes of a separate role."""
    return c.slurm.alone(role).nodes or _nodes_filled(c, role)


def _nodes_filled(c: RunConfig, role: str) -> int:
    """As many nodes as the learner; in a layout of its own as many as its ranks fill."""
    slurm = c.slurm
    if role not in c.roles.layouts:
        return slurm.nodes
    each = slurm.alone(role).gpus_per_node or slurm.tasks_per_node(c.learner.dims.world_size)
    return -(-c.learner_of(role).dims.world_size // each)
