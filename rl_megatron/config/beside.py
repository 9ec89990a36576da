"""The models besides the policy: teachers, reward models, and roles with separate ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.config.sections.data import data_sources
from rl_megatron.config.sections.eval import RunData
from rl_megatron.config.sections.learner import RoleLayoutSection
from rl_megatron.config.sections.teachers import TeacherSection, teacher_role
from rl_megatron.feature import role_models

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def self_teachers(c: RunConfig) -> dict[str, TeacherSection]:
    """The teachers that are the policy itself, by their roles."""
    teachers = c.algorithm.kl.teachers if c.kind.samples else {}
    return {teacher_role(name): one for name, one in teachers.items() if one.path is None}


def teachers_with_prompt(c: RunConfig) -> dict[str, TeacherSection]:
    """The teachers that read a prompt of their own, by their names."""
    teachers = c.algorithm.kl.teachers if c.kind.samples else {}
    return {name: one for name, one in teachers.items() if one.prompt is not None}


def longest_scored_row(c: RunConfig, role: str) -> tuple[str, int]:
    """The keys that give the longest sequence that the model of ``role`` reads, and its tokens."""
    for name, one in c.algorithm.kl.teachers.items():
        if teacher_role(name) == role and one.max_prompt_tokens is not None:
            before = f"algorithm.kl.teachers.{name}.max_prompt_tokens={one.max_prompt_tokens}"
            behind = c.named_longest.removeprefix(f"rollout.max_prompt_tokens={c.rollout.max_prompt_tokens}")
            if not one.reads_another:
                return before + behind, one.max_prompt_tokens + c.max_sampled
            longest = one.max_prompt_tokens + 2 * c.max_sampled
            if longest > c.longest_sequence:  # the teacher reads the latter if no other completion can be shown
                return before + 2 * behind, longest
    return c.named_longest, c.longest_sequence


def scoring_roles(c: RunConfig) -> list[str]:
    """The roles of models that score texts for rewards."""
    return [role for role, one in role_models(c).items() if one.scores]


def separate(c: RunConfig) -> tuple[str, ...]:
    """The roles with ranks of their own, in the order of a job's nodes."""
    return (*c.roles.separate, *role_models(c))


def frozen_folders(c: RunConfig) -> dict[str, tuple[Path | None, str]]:
    """Returns, by role, the Hugging Face folder of each frozen model that ranks hold, and the folder's key. The folder
    is None for the model that training starts from."""
    own: dict[str, tuple[Path | None, str]] = {role: (one.folder, one.key) for role, one in role_models(c).items()}
    return {"reference": (c.reference, "algorithm.kl.reference"), **own} if c.needs_reference else own


def with_role_keys(c: RunConfig, role: str, text: str) -> str:
    """Replaces keys of the learner's layout in ``text`` by those of the role's own layout, if it has one."""
    if role not in c.roles.layouts:
        return text
    keys = "|".join(RoleLayoutSection.model_fields)
    return re.sub(rf"\blearner(?=:|\.({keys})\b)", f"roles.layouts.{role}", text)


def num_role_nodes(c: RunConfig, role: str) -> int:
    """The number of nodes of a separate role: the learner's; in a layout of its own as many as its ranks fill."""
    if role not in c.roles.layouts:
        return c.slurm.nodes
    return -(-c.role_learner(role).dims.world_size // c.slurm.tasks_per_node(c.learner.dims.world_size))


def message_prompt_keys(c: RunConfig) -> set[str]:
    """The keys of the data of sources and sets in which prompts may be lists of messages: an environment that renders a
    conversation begins with them."""
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
