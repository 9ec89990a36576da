"""YAML under conf/ + ``key=value`` overrides -> `RunConfig`, and back to YAML. No other module composes configs.

``group=name`` replaces that whole section by conf/<group>/<name>.yaml; ``a.b=v`` sets one value; groups apply before
values, in any order of arguments. A YAML file may start from others with ``defaults: [base, {group: name}]``; a group's
file that starts from ``_section_`` changes only the keys that it names, and its ``extras`` sets keys of other sections,
which stay where such a section is replaced later.
A model's path, a warm start of no steps and a number of epochs unset earlier keys that they make useless.
Only the sections define defaults of keys; errors.py words the schema's errors; yaml_text.py reads YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_megatron.config import yaml_text
from rl_megatron.config.errors import closest_key, did_you_mean, explain_errors, section_expected
from rl_megatron.config.removed import drop_removed, given_value, new_name, with_new_names
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.jobs import JOBS, WarmStartSection
from rl_megatron.errors import ConfigError, quote_start
from rl_megatron.files import shipped, write_atomically

_MAX_FILES = 100  # files that defaults may lead to
_MAX_LINES = 30  # lines of an error
_MAX_LINE = 1000  # characters of a line


def load_config(
    name: str,
    overrides: Sequence[str],
    root: Path | None = None,
    *,
    otherwise: Mapping[str, object] | None = None,
    missing: Callable[[Mapping[str, Any]], Iterable[str]] = lambda values: (),
) -> RunConfig:
    """Returns the config ``<root>/<name>.yaml``, or the YAML file ``name``, changed by ``key=value`` overrides;
    ``otherwise`` has values of keys that are then null. If values are not valid, ``missing`` gets them, and its lines
    come before the errors.

    ``root`` (default: the shipped conf/) also holds the groups. Raises one ConfigError for all problems of files, YAML,
    overrides, keys and values. Rules between keys are checked once each value is valid.
    """
    root = root or shipped("conf")
    if problem := yaml_text.text_problem(name):
        raise ConfigError(f"--config {quote_start(name)}: {problem}")
    composer = _Composer(root)
    path = Path(name) if Path(name).suffix in {".yaml", ".yml"} else root / f"{name}.yaml"
    near = (Path(name).parent / f"{Path(name).stem}{suffix}" for suffix in (".yaml", ".yml"))
    meant = next(filter(_is_file, (Path(name) / "config.yaml", *near)), None)
    if meant is not None and not _is_file(path):
        raise ConfigError(f"--config {name}: no such file; did you mean --config {meant}?")
    tree = composer.compose(path)
    values: list[tuple[str, object]] = []
    extras: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        parts = key.split(".")
        if problem := yaml_text.text_problem(item):
            composer.problems.append(f"{quote_start(item)}: {problem}")
        elif not equals or not all(parts) or len(parts) > yaml_text.MAX_DEPTH:
            composer.problems.append(f"{quote_start(item)}: not an override{composer.hint(item)}")
        elif key in composer.groups:
            extras = _merged(extras, composer.choose(tree, key, text))
        else:
            values.append((key, yaml_text.scalar(text)))
    tree = _merged(tree, extras)
    for given, wanted in values:
        key, value = new_name(given, wanted, tree) or (given, wanted)
        tree = _cleared(tree, {key: value})
        composer.put(tree, key, value)
    for key, value in (otherwise or {}).items():
        if given_value(tree, key) is None:
            tree = _cleared(tree, {key: value})
            composer.put(tree, key, value)
    try:
        config = RunConfig.model_validate(drop_removed(tree))
    except ValidationError as error:
        composer.problems += missing(tree)
        composer.problems += explain_errors([e for e in error.errors() if not composer.is_consequence(e)])
    if composer.problems:
        raise ConfigError(_bounded(composer.problems))
    return config


def save_resolved(config: RunConfig, path: Path) -> None:
    """Writes every key, defaults too, so that ``load(str(path), [])`` gives an equal config. Atomic.

    Other users cannot read the file if it has environment variables of a job, which may be secrets.
    """
    write_atomically(path, resolved(config), private=config.private)


def resolved(config: RunConfig) -> bytes:
    """Returns the bytes that `save_resolved` writes."""
    return yaml_text.write(config.model_dump(mode="json")).encode()


class _Composer:
    """Builds the tree of values from files and overrides, and collects problems instead of stopping at the first."""

    def __init__(self, root: Path) -> None:
        self.problems: list[str] = []
        self.groups = {folder.name: folder for folder in sorted({path.parent for path in root.glob("*/*.yaml")})}
        self._root = root
        self._files = 0  # number of files requested
        self._unread: set[str] = set()  # sections of files that could not be read
        self._beside: dict[str, Any] = {}  # values that groups' files have set in other sections

    def compose(
        self, path: Path, above: tuple[Path, ...] = (), name: str = "", section: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the file's values over those of its ``defaults``. ``above``: the files with defaults that led to this
        one; ``name``: the choice, for messages; ``section``: the section before the choice, for ``_section_``.
        """
        tree = self._read(path, above, name)
        entries = tree.pop("defaults", [])
        base: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for entry in entries if isinstance(entries, list) else [entries]:
            match entry:
                case "_section_" if section is not None:
                    base = _merged(base, section)
                case str():
                    beside = path.parent / f"{entry}.yaml"
                    parent = beside if _is_file(beside) else self._root / f"{entry}.yaml"
                    base = _merged(base, self.compose(parent, (*above, path)))
                case dict() if len(entry) == 1 and isinstance(next(iter(entry.values())), str):
                    others = _merged(others, self.choose(base, *next(iter(entry.items()))))
                case _:
                    self.problems.append(
                        f"{path}: defaults: {quote_start(entry)} is neither a config's name nor {{group: name}}"
                    )
        given = {key: value for name, section in tree.items() for key, value in _named(name, section)}
        return _merged(_cleared(_merged(base, others), given), tree)

    def choose(self, tree: dict[str, Any], group: str, choice: str) -> dict[str, Any]:
        """Replaces the section by <group>/<choice>.yaml, or merges the file into it if it has ``_section_``. Keys that
        another group's ``extras`` has set in it stay as they are, unless the file has them.

        Returns the values that its ``extras`` sets in other sections.
        """
        path, before = self._root / group / f"{choice}.yaml", tree.get(group)
        kept = before if isinstance(before, dict) else {}
        section = self.compose(path, name=f"{group}={choice}: ", section=kept)
        beside = section.pop("beside", {})
        tree[group] = _merged(_common({group: kept}, self._beside), {group: section})[group]
        others = set(RunConfig.model_fields) - {group}
        wrong = [key for key in beside if key not in others] if isinstance(beside, dict) else [beside]
        if wrong:
            self.problems.append(f"{path}: beside: {quote_start(wrong[0])} is not the name of another section")
            return {}
        self._beside = _merged(self._beside, beside)
        return dict(beside)

    def put(self, tree: dict[str, Any], key: str, value: object) -> None:
        """Sets one value at a dotted key."""
        *sections, leaf = key.split(".")
        for depth, section in enumerate(sections, 1):
            inner = tree.setdefault(section, {})
            if not isinstance(inner, dict):
                above = ".".join(sections[:depth])
                self.problems.append(
                    f"{key:.80}={quote_start(value)}: {above:.80}={quote_start(inner)} is one value, without keys"
                )
                return
            tree = inner
        if isinstance(tree.get(leaf), dict):
            self.problems.append(section_expected(key, value))
        else:
            tree[leaf] = value

    def hint(self, item: str) -> str:
        """Suggests what the user may have meant by an argument that is not an override."""
        meant = [f"{group}={item}" for group, folder in self.groups.items() if _is_file(folder / f"{item}.yaml")]
        if _is_file(self._root / f"{item}.yaml"):
            meant.append(f"--config {item}")
        return (
            did_you_mean(meant) or f"; write section.key=value, or group=name with a group of: {_listed(self.groups)}"
        )

    def is_consequence(self, error: ErrorDetails) -> bool:
        """True if the schema's error follows from a file that could not be read."""
        if error["type"] == "value_error":
            return bool(self.problems)
        in_unread = bool(self._unread.intersection(error["loc"][:1]))
        return in_unread and error["type"] in {"missing", "extra_forbidden", "union_tag_not_found"}

    def _read(self, path: Path, above: tuple[Path, ...], name: str) -> dict[str, Any]:
        self._files += 1
        problem = ""
        if path in above:
            problem = f"defaults lead in a circle: {' -> '.join(p.stem for p in (*above, path))}"
        elif self._files > _MAX_FILES:
            problem = f"defaults lead to more than {_MAX_FILES} files"
        elif not _is_file(path):
            names = _sibling_names(path)
            problem = f"no such file{closest_key(path.stem, names)}; one of: {_listed(names)}"
        else:
            try:
                tree = yaml_text.read(path)
            except ConfigError as error:
                problem = str(error)
            else:
                if isinstance(tree, dict):
                    return with_new_names(tree, path.parent.name if path.parent in self.groups.values() else "")
                if tree is None:
                    return {}
                problem = f"holds {quote_start(tree)}; a config file is a mapping, `key: value` a line"
        self.problems.append(f"{name}{path}: {problem}")
        self._unread |= (
            {path.parent.name} if path.parent.name in RunConfig.model_fields else set(RunConfig.model_fields)
        )
        return {}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _common(tree: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``tree`` at those of the nested ``keys`` that it has."""
    out: dict[str, Any] = {}
    for key in (key for key in keys if key in tree):
        both = isinstance(tree[key], dict) and isinstance(keys[key], dict)
        out[key] = _common(tree[key], keys[key]) if both else tree[key]
    return out


def _named(name: str, section: object) -> list[tuple[str, object]]:
    """The values of a section by their full names."""
    return [(f"{name}.{key}", value) for key, value in section.items()] if isinstance(section, dict) else []


def _cleared(base: dict[str, Any], given: Mapping[str, object]) -> dict[str, Any]:
    """Returns ``base`` without keys that ``given``, a file above or a later override, leaves without effect. A model
    unsets the sizes of a tiny one, a warm start of 0 steps its other keys, and a number of epochs that of steps.
    """
    cleared: dict[str, tuple[str, ...]] = {}
    if given.get("model.path") is not None:
        cleared["model"] = ("tiny", "cache_dir")
    if given.get("warm_start.steps") == 0:
        cleared["warm_start"] = tuple(WarmStartSection.model_fields)
    if any(given.get(f"{job}.epochs") is not None for job, kind in JOBS.items() if not kind.samples):
        cleared["train"] = ("steps",)
    out = dict(base)
    for name, keys in cleared.items():
        if isinstance(section := base.get(name), dict):
            out[name] = {key: value for key, value in section.items() if key not in keys}
    return out


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its name is too long for the file system, for example
        return False


def _sibling_names(path: Path) -> set[str]:
    """The names of the configurations in the file's folder, if there is one."""
    try:
        return {p.stem for p in path.parent.glob("[!.]*.yaml")}
    except OSError:
        return set()


def _bounded(problems: Sequence[str]) -> str:
    """Joins problems, one a line: only the first of many problems, only both ends of long lines."""
    half = _MAX_LINE // 2
    lines = [p if len(p) <= _MAX_LINE else f"{p[:half]}...{p[-half:]}" for p in problems[:_MAX_LINES]]
    more = len(problems) - _MAX_LINES
    return "\n".join([*lines, *([f"... and {more} more"] if more > 0 else [])])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"
