"""Refuses set keys that the job does not read, and data of another form than it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.reads.leaves import Leaf, as_given, is_in, set_leaves
from rl_megatron.config.sections.data import TURNS_IN_TEXT, FileKeys, data_sources
from rl_megatron.config.sections.jobs import JOBS, JobKind

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of_job(config: RunConfig) -> list[str]:
    """A line for each set key that the job does not read, and for data of another form than it trains on."""
    given = {name.removeprefix("."): leaf for name, leaf in set_leaves("", config)}
    for key, source in data_sources(config.data).items():
        given |= set_leaves(key, source) if key != "data" else {}
    unread = sorted(name for name in given if not _read(config.kind, name))
    return [*(_not_read(name, given[name], config.job) for name in unread), *_of_other_form(config)]


def _not_read(name: str, leaf: Leaf, job: str) -> str:
    readers = " or ".join(f"job={other}" for other, kind in JOBS.items() if _read(kind, name))
    return (
        f"{name}={as_given(leaf.value)}: job={job} does not read it, {readers} may; leave it out, or set it to its "
        f"default, {as_given(leaf.default)}"
    )


def _of_other_form(config: RunConfig) -> Iterator[str]:
    """The sources of a job on pairs that have none, and of one that learns answers whose answer is the question."""
    demonstrated = config.environment.function is not None  # which is what a warm start learns then
    learns = not config.kind.samples or (config.warm_start.steps > 0 and not demonstrated)
    for key, source in data_sources(config.data).items():
        if not isinstance(source, FileKeys):
            if config.kind.labels:
                yield f"job={config.job} {key}.type={source.type}: its problems have no labels; read rows of files"
            continue
        is_answer = source.prompt_field in (source.answer_field, source.rejected_field)
        shown = config.algorithm.demonstration_gamma is not None and source.demonstration_field is None
        if (learns or shown) and source.messages_field is None and is_answer:
            yield (
                f"{key}.prompt_field={source.prompt_field!r} is the field of an answer, too, so a model would learn to "
                f"repeat the question; name both. {TURNS_IN_TEXT}"
            )
        if config.kind.pairs and source.rejected_field is None:
            yield (
                f"job={config.job} trains on pairs of answers, and {key}.rejected_field is not given; set it to the "
                f"field of the worse one (of the better one: {key}.answer_field={source.answer_field})"
            )
        if config.kind.labels and source.rejected_field is not None:
            yield (
                f"{key}.rejected_field={source.rejected_field}: dpo.loss={config.dpo.loss} trains on one answer a row, "
                "with its label; leave it out, or set another loss"
            )


def _read(kind: JobKind, leaf: str) -> bool:
    """Whether jobs of the kind read a key; a source of a mixture has the keys of ``data``."""
    names = [leaf, f"data.{leaf.split('.')[-1]}"] if leaf.startswith("data.sources.") else [leaf]
    unread = any(is_in(one, key) for key in kind.unread for one in names)
    return not unread and (kind.reads is None or any(is_in(one, key) for key in kind.reads for one in names))
