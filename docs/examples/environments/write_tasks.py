"""Write the problems of another library as train.jsonl and eval.jsonl, which data.type=files reads.

    python docs/examples/environments/write_tasks.py FOLDER SOURCE [KEY=VALUE ...]

SOURCE is package.module:name of a function that takes the keys and gives (rows to train on, held-out rows): mappings
with ``question``, ``answer`` and fields of your own. Values are YAML.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.files import write_atomically
from rl_megatron.user_code import load_named

Rows = Iterable[Mapping[str, Any]]


def main(
    folder: Annotated[Path, typer.Argument(help="where the two files are written", show_default=False)],
    source: Annotated[str, typer.Argument(help="package.module:name of a function", show_default=False)],
    keys: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE of the source", show_default=False)] = None,
) -> None:
    """Write the problems of a source."""
    try:
        run(folder, source, keys or ())
    except RLMegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def run(folder: Path, source: str, keys: Iterable[str] = ()) -> None:
    """Write both files, or neither.

    Raises ConfigError for an unknown source, keys that it does not take, rows that JSON cannot hold, a split
    without rows, and files that exist.
    """
    function: Callable[..., tuple[Rows, Rows]] = load_named(source, "SOURCE", "function", callable)
    paths = folder / "train.jsonl", folder / "eval.jsonl"
    if there := [str(path) for path in paths if path.exists()]:
        raise ConfigError(f"{', '.join(there)}: is there already; remove it, or name another folder")
    try:
        splits = function(**dict(_pair(one) for one in keys))
    except TypeError as error:
        raise ConfigError(f"{source}: {error}") from error
    if not isinstance(splits, tuple | list) or len(splits) != len(paths):
        raise ConfigError(f"{source} gave {splits!r:.80}; it must give a pair: rows to train on, and held-out rows")
    texts = ["".join(_lines(source, path.name, rows)) for path, rows in zip(paths, splits, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for path, text in zip(paths, texts, strict=True):  # half of a surrogate pair is written as JSON escapes it
            write_atomically(path, text.encode(errors="backslashreplace"))
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    for path, text in zip(paths, texts, strict=True):
        print(f"{path}: {text.count(chr(10))} problems")


def _lines(source: str, file: str, rows: Rows) -> Iterator[str]:
    number = 0
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"{row!r:.80} is no mapping")
            yield json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{source}, row {number} of {file}: {error}; give texts, finite numbers of Python, lists and mappings"
            ) from error
    if not number:
        raise ConfigError(f"{source} gave no row for {file}; a run reads both files")


def _pair(given: str) -> tuple[str, Any]:
    key, equals, value = given.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"{given!r:.200}: write it as KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{given!r:.200}: its value is no YAML") from error


if __name__ == "__main__":
    typer.run(main)
