"""Checks that the files of problems exist, and that their first rows have the configured fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.config.sections.data import FileData, data_sources
from rl_megatron.data.files import read_records
from rl_megatron.data.prompts import check_template, fields_of
from rl_megatron.errors import ConfigError, RLMegatronError

ROWS = 1000


def check(subject: Subject) -> Iterator[Found]:
    """Reads the first rows of ``train`` and ``eval`` of each source, and of ``eval`` of each set, and yields why one
    cannot be read."""
    for key, data in data_sources(subject.config.data).items():
        if isinstance(data, FileData):
            yield from _of(key, data, {"train": data.train, "eval": data.eval})
    for key, data in subject.config.eval.data_of_sets.items():
        if isinstance(data, FileData):
            yield from _of(key, data, {"eval": data.eval})


def _of(section: str, data: FileData, files: Mapping[str, Path]) -> Iterator[Found]:
    """What is wrong in the ``files`` of ``data``, by the name of their key."""
    longer = []
    for name, path in files.items():
        key = f"{section}.{name}"
        try:
            rows = read_records(path, fields_of(data, path), key=key, limit=ROWS)
        except RLMegatronError as error:
            yield problem(str(error))
        else:
            longer += [str(path)] if len(rows) == ROWS else []
    if longer:
        yield unchecked(f"rows of {' and '.join(longer)} after the first {ROWS}")
    try:
        check_template(data, section)
    except ConfigError as error:
        yield problem(str(error))
    yield unchecked("whether prompts fit in rollout.max_prompt_tokens")
