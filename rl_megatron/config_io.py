"""YAML under conf/ + ``key=value`` overrides -> `RunConfig`, and back to YAML. No other module composes configs.

``group=name`` puts conf/<group>/<name>.yaml in the place of that section, whole; ``a.b=v`` sets one value; groups are
chosen first, wherever they stand. A YAML file may start from others with ``defaults: [base, {group: name}]``; a group's
file that starts from ``_section_`` is laid over the section as it stood. Defaults of keys live in config.py alone, and
what the schema says of a bad value is put into words by config_errors.py.

YAML here is YAML 1.2's core schema, not PyYAML's 1.1: ``3e-4`` is a number, ``off`` and ``no`` are text, and a key that
is given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_megatron.config import RunConfig
from rl_megatron.config_errors import explain, near_miss, not_a_section, shorten
from rl_megatron.durable import write_atomically
from rl_megatron.errors import ConfigError

_CONF = Path(__file__).resolve().parent.parent / "conf"
_CORE_SCHEMA = (  # tag, spelling, first characters
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
)


def load(name: str, overrides: Sequence[str], root: Path | None = None) -> RunConfig:
    """The config ``<root>/<name>.yaml``, or the YAML file ``name``, changed by ``key=value`` overrides.

    ``root`` (the conf/ folder beside the package) also holds the groups. Raises ConfigError with everything that is
    wrong at once: files, YAML, overrides, keys and values; rules between keys are checked once each value is good.
    """
    root = root or _CONF
    composer = _Composer(root)
    is_path = Path(name).suffix in {".yaml", ".yml"}
    tree = composer.compose(Path(name) if is_path else root / f"{name}.yaml")
    groups = {path.parent.name for path in root.glob("*/*.yaml")}
    values: list[tuple[str, object]] = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not all(key.split(".")):
            composer.problems.append(
                f"{item!r}: not an override; write section.key=value, or group=name with a group of: {_listed(groups)}"
            )
        elif key in groups:
            composer.choose(tree, key, text)
        else:
            values.append((key, _scalar(text)))
    for key, value in values:
        composer.put(tree, key, value)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        composer.problems += explain([e for e in error.errors() if not composer.is_consequence(e)])
    if composer.problems:
        raise ConfigError("\n".join(composer.problems))
    return config


def save_resolved(config: RunConfig, path: Path) -> None:
    """Write every key, defaults too, so that ``load(str(path), [])`` gives an equal config. Atomic."""
    text = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    write_atomically(path, text.encode("utf-8"))


class _Composer:
    """Builds the tree of values out of files and overrides, collecting what is wrong instead of stopping at it."""

    def __init__(self, root: Path) -> None:
        self.problems: list[str] = []
        self._root = root
        self._unread: set[str] = set()  # sections whose file could not be read

    def compose(
        self, path: Path, above: tuple[Path, ...] = (), asked: str = "", section: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The file's values over those of its ``defaults``; ``above``: the files that led here, ``asked``: a choice.

        ``section`` is what stood in the place of the choice, which ``_section_`` among its defaults keeps.
        """
        tree = self._read(path, above, asked)
        entries = tree.pop("defaults", [])
        base: dict[str, Any] = {}
        for entry in entries if isinstance(entries, list) else [entries]:
            match entry:
                case "_section_" if section is not None:
                    base = _merged(base, section)
                case str():
                    beside = path.parent / f"{entry}.yaml"
                    parent = beside if beside.is_file() else self._root / f"{entry}.yaml"
                    base = _merged(base, self.compose(parent, (*above, path)))
                case dict() if len(entry) == 1 and isinstance(next(iter(entry.values())), str):
                    self.choose(base, *next(iter(entry.items())))
                case _:
                    self.problems.append(f"{path}: defaults: {entry!r} is neither a config's name nor {{group: name}}")
        return _merged(base, tree)

    def choose(self, tree: dict[str, Any], group: str, choice: str) -> None:
        """Put <group>/<choice>.yaml in the place of the section, whole, or over it where the file says so."""
        path, before = self._root / group / f"{choice}.yaml", tree.get(group)
        kept = before if isinstance(before, dict) else {}
        tree[group] = self.compose(path, asked=f"{group}={choice}: ", section=kept)

    def put(self, tree: dict[str, Any], key: str, value: object) -> None:
        """Set one value at a dotted key."""
        *sections, leaf = key.split(".")
        for depth, section in enumerate(sections, 1):
            inner = tree.setdefault(section, {})
            if not isinstance(inner, dict):
                above = ".".join(sections[:depth])
                self.problems.append(f"{key}={shorten(value)}: {above}={shorten(inner)} is one value, without keys")
                return
            tree = inner
        if isinstance(tree.get(leaf), dict):
            self.problems.append(not_a_section(key, value))
        else:
            tree[leaf] = value

    def is_consequence(self, error: ErrorDetails) -> bool:
        """Whether the schema complains only because a file is missing from the tree."""
        if error["type"] == "value_error":
            return bool(self.problems)
        in_unread = bool(self._unread.intersection(error["loc"][:1]))
        return in_unread and error["type"] in {"missing", "extra_forbidden", "union_tag_not_found"}

    def _read(self, path: Path, above: tuple[Path, ...], asked: str) -> dict[str, Any]:
        problem = ""
        if path in above:
            problem = f"defaults lead in a circle: {' -> '.join(p.stem for p in (*above, path))}"
        elif not path.is_file():
            names = {p.stem for p in path.parent.glob("[!.]*.yaml")}
            problem = f"no such file{near_miss(path.stem, names)}; one of: {_listed(names)}"
        else:
            try:
                with path.open(encoding="utf-8") as stream:
                    tree = yaml.load(stream, Loader=_Loader)  # a SafeLoader
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                problem = f"cannot be read: {error}"
            else:
                if isinstance(tree, dict):
                    return tree
                if tree is None:
                    return {}
                problem = f"holds {shorten(tree)}; a config file is a mapping, `key: value` a line"
        self.problems.append(f"{asked}{path}: {problem}")
        self._unread |= (
            {path.parent.name} if path.parent.name in RunConfig.model_fields else set(RunConfig.model_fields)
        )
        return {}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema; a key is text and is given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        out: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in out:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            out[key] = self.construct_object(value_node, deep=True)
        return out


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that YAML 1.1 or 1.2 would take for something else."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _spelling, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_spelling})\Z"), list(_first))


def _scalar(text: str) -> object:
    """An override's value: text in quotes, or else what the whole of it is as a plain YAML scalar.

    Never a list, a mapping or a comment, so that ``data.prompt_template={prompt} #`` needs no escapes.
    """
    if text[:1] not in {'"', "'"} and not any(re.fullmatch(spelling, text) for _, spelling, _ in _CORE_SCHEMA):
        return text
    try:
        value: object = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) else value


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"
