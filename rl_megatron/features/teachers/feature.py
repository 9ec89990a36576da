"""``algorithm.kl.teachers``: models that score the policy's samples, on ranks or in servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.sections.teachers import OTHER_COMPLETION_FIELD, TeacherSection, teacher_role
from rl_megatron.feature import Feature, RoleModel
from rl_megatron.rules import UNSET, CheckFunction, Excludes, Needs, Not, On, ReadIf

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig

_TEACHERS = On("algorithm.kl.teachers", Not({}))


def _roles(c: RunConfig) -> dict[str, RoleModel]:
    """Returns the teachers that have separate ranks."""
    teachers = c.algorithm.kl.teachers if c.kind.samples else {}
    return {
        teacher_role(name): RoleModel(folder=one.path, key=f"algorithm.kl.teachers.{name}.path")
        for name, one in teachers.items()
        if one.server is None and one.path is not None
    }


def _problems(c: RunConfig) -> Iterator[str]:
    """Yields errors for teachers of no source, several of the same one, and own prompts that they cannot read."""
    from rl_megatron.config.beside import teachers_with_prompt  # sections import it, and it imports this

    kl, key = c.algorithm.kl, "algorithm.kl.teachers"
    if not kl.teachers:
        return
    known = c.source_names
    for name, one in kl.teachers.items():
        for source in one.sources:
            if source not in known:
                yield f"{key}.{name}.sources names {source!r:.80}; data.sources has {', '.join(known) or 'none'}"
    for source in known or ("",):
        of = [name for name, one in kl.teachers.items() if not one.sources or source in one.sources]
        if not of:
            yield f"{key}: no teacher scores prompts of data.sources.{source}; add it to the sources of one"
        if len(of) > 1 and kl.estimator != "k1":
            yield (
                f"{key}: {', '.join(of)} score the same prompts, but only estimator=k1 can combine several; "
                "set algorithm.kl.estimator=k1, or one teacher"
            )
    for name, one in teachers_with_prompt(c).items():
        yield from _own_prompt_problems(c, name, one)


def _own_prompt_problems(c: RunConfig, name: str, one: TeacherSection) -> Iterator[str]:
    """Yields a line for each reason why a teacher cannot read the samples after its own prompt."""
    from rl_megatron.config.beside import longest_scored_row

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
            f"{key}.prompt has {{{OTHER_COMPLETION_FIELD}}} with rollout.group_size=1: no group has another "
            "completion; raise "
            "group_size, or leave it out"
        )
    role, most = teacher_role(name), c.learner.max_tokens_per_micro_batch
    named, longest = longest_scored_row(c, role)
    if one.server is None and longest > most:
        yield (
            f"learner.max_tokens_per_micro_batch={most} is less than the longest sequence that {role} reads, ({named}) "
            f"= {longest}; raise the first or lower the others"
        )


FEATURE = Feature(
    name="teachers",
    roles=_roles,
    rules=(
        Excludes(one=_TEACHERS, other=On("algorithm.kl.reference"), why="both score the policy", fix="keep one"),
        Excludes(one=_TEACHERS, other=On("algorithm.preference.beta"),
                 why="pairs have a reference of the run, or none", fix="leave algorithm.kl.teachers out"),
        Needs(when=(On("algorithm.kl.reference_update_rate"), _TEACHERS), all=On("algorithm.kl.teachers.*.path", UNSET),
              why="no teacher is the policy's moving average, because each has a path",
              fix="leave reference_update_rate out, or a teacher's path"),
        Excludes(one=On("algorithm.kl.teachers.*.server"), other=On("rollout.temperature", Not(1)),
                 why="servers return log-probs of prompts only at temperature 1",
                 fix="set rollout.temperature=1, or leave server out, so that ranks hold it"),
        Needs(when=On("algorithm.kl.teachers.*.server"), all=On("algorithm.kl.teachers.*.engine"),
              why="requests depend on the engine", fix="give engine=vllm or sglang, which serves there"),
        ReadIf(keys=tuple(f"algorithm.kl.teachers.*.{key}" for key in ("engine", "token_file", "timeout_seconds")),
               any_of=(On("algorithm.kl.teachers.*.server"),), why="ranks of the run hold this teacher"),
        CheckFunction(_problems),
    ),
    step="rl_megatron.features.teachers.step:make_hooks",
    served="rl_megatron.features.teachers.served:served_teachers",
)  # fmt: skip
