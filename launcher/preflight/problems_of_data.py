"""Checks that the files of problems exist, and that their first rows have the configured fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.config.sections.data import FileKeys, data_sources
from rl_megatron.data.problems.files import files_in, local_files, read_records
from rl_megatron.data.problems.prompts import check_template
from rl_megatron.data.problems.rendering import check_pair, conversation, fields_of
from rl_megatron.errors import ConfigError, RLMegatronError

ROWS = 1000


def check(subject: Subject) -> Iterator[Found]:
    """Reads the first rows of ``train`` and ``eval`` of each source, and of ``eval`` of each set, and yields why one
    cannot be read."""
    named, _ = subject.config.prompt_limit_keys
    for key, data in data_sources(subject.config.data).items():
        if isinstance(data, FileKeys):
            yield from _of(key, data, ("train", "eval"), named)
    for key, data in subject.config.eval.data_of_sets.items():
        if isinstance(data, FileKeys):
            yield from _of(key, data, ("eval",), named)


def _of(section: str, data: FileKeys, names: Sequence[str], limit: str) -> Iterator[Found]:
    """What is wrong in these files of ``data``, by the names of their keys. ``limit``: the key of most tokens."""
    try:
        data = local_files(data, section)
    except RLMegatronError as error:
        yield problem(str(error))
        return
    files: Mapping[str, Path] = {name: getattr(data, name) for name in names}
    longer = []
    for name, path in files.items():
        key = f"{section}.{name}"
        try:
            first, *others = files_in(path, key)
            rows = read_records(first, fields_of(data), key=key, limit=ROWS)
            for line, row in enumerate(rows, 1):
                if data.messages_field is not None:
                    conversation(row, first, line, data)
                else:
                    check_pair(row, f"{first}:{line}", data)
        except RLMegatronError as error:
            yield problem(str(error))
        else:
            longer += [str(path)] if others or len(rows) == ROWS else []
    if longer:
        yield unchecked(f"rows of {' and '.join(longer)} after the first {ROWS}")
    try:
        check_template(data, section)
    except ConfigError as error:
        yield problem(str(error))
    yield unchecked(f"whether prompts fit in {limit}")
