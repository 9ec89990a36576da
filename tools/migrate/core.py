"""Turns the keys of another framework's file into a configuration of this project, by tools/migrate/tables."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_megatron.config import yaml_text
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.jobs import JOBS
from rl_megatron.errors import ConfigError, quote_start
from rl_megatron.rules import contains_leaf
from tools.migrate import conversions, slime, trl, verl
from tools.migrate.given import SKIP, Given, NoCounterpart, Reader, ToSet
from tools.migrate.tables import Cell, Framework, OurKey, framework, our_keys

READERS: Mapping[str, Reader] = {one.FRAMEWORK: one for one in (verl, slime, trl)}
"""The readers in the order in which they are asked."""
MAX_BYTES = 1 << 18
READ_BY_READERS = ("entry", "program", "trainer")
"""Names that readers add for what a file calls, such as its trainer."""
_UNREAD = re.compile(
    r"(?P<key>[\w.]+)=.* does nothing: (?P<why>.*); leave it out"
    r"|(?P<key2>[\w.]+)=.*: (?P<why2>job=\w+ does not read it)"
)
_FILES = ("model.path", "reward_models.", "data.train", "data.eval", "algorithm.critic.path", "algorithm.kl.reference")


@dataclass(frozen=True, slots=True)
class Line:
    """A key to write."""

    key: str
    value: object
    source: str
    """The comment: where the value is from."""
    is_default: bool = False
    """True if it is a default of theirs, which the file does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration made of another framework's file."""

    framework: str
    row: str | None
    """The row of ``conf/algorithm/``; None for a job without one."""
    lines: tuple[Line, ...]
    not_carried: tuple[str, ...]
    """A line for each key of theirs that no line of ours follows from, with the reason."""
    to_set: tuple[str, ...]
    """Sentences that say what the user must still set."""
    config: RunConfig = field(repr=False)


def import_file(path: Path, format_name: str | None = None) -> Imported:
    """Returns the configuration that a file gives. Raises ConfigError that names each value that cannot be imported.

    ``format_name``: the framework, ``verl``, ``TRL`` or ``slime``; None finds it by the file's text.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: holds more than {MAX_BYTES} bytes; a script or a configuration is far shorter")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    for name, reader in READERS.items():
        if name == format_name or (format_name is None and reader.recognizes(text, path)):
            try:
                return convert(reader.read(text, path))
            except ConfigError as error:
                raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
            except RecursionError as error:
                raise ConfigError(f"{path}: expressions or sections are nested too deep") from error
    raise ConfigError(
        f"{path}: not a file of verl (a script with main_ppo, or its YAML), of TRL (a YAML for trl, or a Python script "
        "with its Config and Trainer) or of slime (a script with its arguments); name one with --from"
    )


def convert(given: Given) -> Imported:
    """Returns the configuration that keys of a framework give. Raises ConfigError like `import_file`."""
    return _Conversion(given).result()


class _Conversion:
    """Collects lines, keys without a counterpart, and refusals, of one file."""

    def __init__(self, given: Given) -> None:
        self.table: Framework = framework(given.framework)
        self.values = {self.table.renamed.get(key, key): value for key, value in given.values.items()}
        self.names = {self.table.renamed.get(key, key): key for key in given.values}
        self.notes = given.notes
        self.teller = "the program" if given.framework == "TRL" else "the shell"
        trainer = self.values.get("trainer")
        self.of_trainer = self.table.trainers.get(str(trainer and trainer.value), {})
        self.defaults = {**self.table.defaults, **self.of_trainer}
        self.functions: tuple[ModuleType, ...] = (READERS[given.framework], conversions)  # type: ignore[assignment]
        self.read: set[str] = set()  # keys of theirs that a line or a choice follows from
        self.refused: list[str] = []
        self.to_set: list[str] = []
        self.targets: dict[str, set[str]] = {}  # our key -> the named keys of theirs that it follows from
        self.dropped: dict[str, str] = {}  # our keys that nothing reads under the choices -> why

    def result(self) -> Imported:
        row, chosen = self._choose()
        lines = list(self._lines(row, chosen))
        not_carried = list(self._not_carried())
        if self.refused:
            raise ConfigError("\n".join(self.refused))
        lines, config = self._load(row, lines)
        kept = {key for ours, keys in self.targets.items() if ours not in self.dropped for key in keys}
        for ours, why in self.dropped.items():
            not_carried += [f"{self._shown(key)}: {why}" for key in sorted(self.targets[ours] - kept)]
        return Imported(
            framework=self.table.name,
            row=row,
            lines=tuple(lines),
            not_carried=tuple(dict.fromkeys(not_carried)),
            to_set=tuple(dict.fromkeys((*self.to_set, *self.notes))),
            config=config,
        )

    def _choose(self) -> tuple[str | None, list[Line]]:
        """Chooses the row of the algorithm, and returns the keys that belong to it."""
        for row in self.table.rows:
            if row.when is not None and self._holds(row.when):
                self.read |= row.when.keys()
                if row.refuse:
                    raise NoCounterpart(f"{', '.join(map(self._shown, row.when))}: {row.refuse}")
                self.to_set += [row.note] if row.note else []
                source = ", ".join(self._shown(key) for key in row.when) or f"{self.table.name} always"
                return row.row, [Line(key, value, source) for key, value in row.set.items()]
        keys = dict.fromkeys(key for row in self.table.rows for key in row.when or () if key in self.values)
        chosen = ", ".join(self._shown(key) for key in keys) or "the file names no algorithm"
        raise NoCounterpart(f"{chosen}: no row of conf/algorithm has this loss (docs/migrating.md)")

    def _holds(self, when: Mapping[str, object]) -> bool:
        return all(
            is_same(self._value(key), wanted)
            if not isinstance(wanted, list)
            else any(is_same(self._value(key), one) for one in wanted)
            for key, wanted in when.items()
        )

    def _value(self, key: str) -> object:
        return self.values[key].value if key in self.values else self.defaults.get(key)

    def _shown(self, key: str) -> str:
        """Returns a key of theirs with its value, and its line or a note that it is their default."""
        if key in self.values:
            one = self.values[key]
            return f"{self.names[key]}={_as_text(one.value)} (line {one.line})"
        return f"{key}={_as_text(self.defaults.get(key))} (their default)"

    def _lines(self, row: str | None, chosen: Sequence[Line]) -> Iterator[Line]:
        """Yields the lines with a value that differs from the row's."""
        by_key = {line.key: line for line in chosen}
        base = _base(row, chosen)
        kind = JOBS[find_value(base, "job")]  # type: ignore[index]
        for key, ours in our_keys().items():
            if (kind.reads is not None and not any(contains_leaf(key, one) for one in kind.reads)) or any(
                contains_leaf(key, one) for one in kind.unread
            ):
                continue
            cell = next((one for one in self.table.cells.get(key, ()) if self._holds(one.when)), None)
            line = self._line(ours, cell) if cell and cell.converts else None
            line = line or by_key.get(key)
            if line is not None and (key == "job" or not is_same(find_value(base, key), line.value)):
                yield line
            by_key.pop(key, None)
        yield from by_key.values()

    def _line(self, ours: OurKey, cell: Cell) -> Line | None:
        named = [key for key in cell.sources if key in self.values]
        self.read.update(named)
        if not (named or ours.changes_loss or cell.always):
            return None
        try:
            value = self._converted(ours, cell)
        except NoCounterpart as error:
            shown = ", ".join(map(self._shown, named or cell.sources))
            self.refused.append(f"{shown}: {error}")
            return None
        if isinstance(value, ToSet):
            self.to_set.append(value.advice)
            value = value.value
        self.targets[ours.name] = set(named)
        source = self._source(cell, named, value)
        return None if value is SKIP else Line(ours.name, value, source, is_default=not named and bool(cell.sources))

    def _source(self, cell: Cell, named: Sequence[str], value: object) -> str:
        """Returns the comment of a line: its keys of theirs, and a default of theirs that is the value."""
        from_default = [
            key for key in cell.sources if key not in self.values and is_same(self.defaults.get(key), value)
        ]
        if named and (any(is_same(self._value(key), value) for key in named) or not from_default):
            return ", ".join(map(self._shown, named))
        first = (from_default or cell.sources)[:1]
        return ", ".join(map(self._shown, dict.fromkeys((*first, *named)))) or cell.why or ""

    def _converted(self, ours: OurKey, cell: Cell) -> object:
        if not cell.sources:
            return cell.constant
        for key in cell.sources:
            is_text = _is_text(ours.name) or key.endswith("_files")  # the rows of files that are here are counted
            if key in self.values and self.values[key].unresolved and not is_text:
                parts = ", ".join(dict.fromkeys(self.values[key].unresolved))
                if not ours.changes_loss:
                    return ToSet(SKIP, f"{ours.name}: only {self.teller} knows {parts}; set it")
                raise NoCounterpart(f"only {self.teller} knows {parts}; write the value out")
            if key in self.values and self.values[key].unresolved:
                parts = ", ".join(dict.fromkeys(self.values[key].unresolved))
                if ours.name.startswith(_FILES):
                    self.to_set.append(f"{ours.name}: write out {parts}, which only {self.teller} knows")
        own = {**dict(zip(cell.sources, cell.defaults, strict=False)), **self.of_trainer}
        values = [self.values[key].value if key in self.values else own.get(key) for key in cell.sources]
        if cell.values:
            shown = _as_text(values[0])
            if shown not in cell.values:
                raise NoCounterpart(f"no value of {ours.name} has this effect")
            return cell.values[shown]
        if cell.how is None:
            return values[0]
        function: Callable[..., object] = next(
            getattr(one, cell.how) for one in self.functions if hasattr(one, cell.how)
        )
        try:
            return function(*values)
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise NoCounterpart("the value is not a number, where one is needed") from error

    def _not_carried(self) -> Iterator[str]:
        """Yields a line for each key of theirs that gives none of our lines."""
        for key, value in self.values.items():
            if key in self.read or key in READ_BY_READERS:
                continue
            entry = next((one for one in self.table.without if any(_matches(key, name) for name in one.keys)), None)
            if entry is None:
                yield f"{self._shown(key)}: not in the tables; look whether it changes the loss"
            elif entry.changes_loss and not any(is_same(value.value, one) for one in entry.harmless):
                self.refused.append(f"{self._shown(key)}: {entry.why}")
            else:
                yield f"{self._shown(key)}: {entry.why}"

    def _load(self, row: str | None, lines: list[Line]) -> tuple[list[Line], RunConfig]:
        """Loads the configuration, without lines that nothing reads under its choices."""
        while True:
            try:
                return lines, load_text(render(row, lines))
            except ConfigError as error:
                problems = str(error).splitlines()
            unread = {
                match["key"] or match["key2"]: match["why"] or match["why2"]
                for match in map(_UNREAD.match, problems)
                if match
            }
            gone = [line for line in lines if line.key in unread]
            if not gone:
                sources = {line.key: line.source for line in lines}
                raise ConfigError("\n".join(_with_source(problem, sources) for problem in problems))
            lines = [line for line in lines if line.key not in unread]
            self.dropped |= {line.key: unread[line.key] for line in gone}
            self.targets |= {line.key: set() for line in gone if line.key not in self.targets}


def render(row: str | None, lines: Iterable[Line]) -> str:
    """Returns the YAML of a configuration: the row, then each key with its source as a comment."""
    tree: dict[str, Any] = {}
    for line in lines:
        *sections, leaf = line.key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = line
    tree = {name: tree[name] for name in (*RunConfig.model_fields,) if name in tree} | tree
    head = f"defaults:\n- algorithm: {row}\n" if row else ""
    return head + "".join(_rendered(tree, ""))


def load_text(text: str) -> RunConfig:
    """Loads a configuration from text, as a file. Raises ConfigError for all its problems."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config(str(file), [])


def _rendered(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Line):
            comment = " ".join(value.source.split())
            yield f"{indent}{key}: {_scalar(value.value)}{' # ' + comment if comment else ''}\n"
        else:
            yield f"{indent}{key}:\n"
            yield from _rendered(value, indent + "  ")


def _scalar(value: object) -> str:
    """Returns a value as YAML on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_scalar(one) for one in value)}]"
    return yaml_text.write(value).removesuffix("...\n").strip()


def _base(row: str | None, chosen: Sequence[Line]) -> Mapping[str, Any]:
    """Returns the values of a configuration that has the row alone."""
    job = [line for line in chosen if line.key == "job"]
    return load_text(render(row, job)).model_dump(mode="json")


def find_value(tree: Mapping[str, Any], key: str) -> object:
    """Returns the value at a dotted key; SKIP, which equals nothing, if it is not there."""
    place: Any = tree
    for part in key.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return SKIP
        place = place[part]
    return place


def _is_text(key: str) -> bool:
    """True if a value of our key is a text that the user can complete: a path or a name."""
    return key.startswith((*_FILES, "model.name", "run.", "log.", "reward."))


def _matches(key: str, name: str) -> bool:
    return key.startswith(name[:-1]) if name.endswith("*") else key == name


def is_same(one: object, other: object) -> bool:
    """True for equal values, also a number and its text."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return _as_text(one) == _as_text(other)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return float(one) == float(other)
    return one == other or _as_text(one) == _as_text(other)


def _as_text(value: object) -> str:
    """Returns a value in the spelling of a configuration."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(quote_start(value)) if isinstance(value, Mapping) else str(value)


def _with_source(problem: str, sources: Mapping[str, str]) -> str:
    """Returns a problem of the configuration with the keys of theirs that led to it."""
    named = [f"{key} is from {source}" for key, source in sources.items() if f"{key}=" in problem]
    return f"{problem} ({'; '.join(named)})" if named else problem
