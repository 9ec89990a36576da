"""Rules between keys as rows of a table, and the function that lists the rows that a configuration breaks.

A row names keys by their dotted paths, so that this module knows no section: `broken` reads them as attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel

When = Literal["config", "shape", "machine", "job"]
"""When a row is checked: as a configuration is loaded, or as soon as the model's shape is known, or on the machine that
runs it, or before it becomes a job."""


@dataclass(frozen=True, slots=True)
class Not:
    """A test of a value: it differs from ``value``."""

    value: object


@dataclass(frozen=True, slots=True)
class OneOf:
    """A test of a value: it is one of ``values``."""

    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Has:
    """A test of a list: ``value`` is in it. Messages name that alone."""

    value: object


@dataclass(frozen=True, slots=True)
class Above:
    """A test of a number: it is greater than ``limit``, a number or the path of a key."""

    limit: float | str


@dataclass(frozen=True, slots=True)
class Below:
    """A test of a number: it is less than ``limit``, a number or the path of a key."""

    limit: float | str


SET: Final = Not(None)
"""A test of a value: it is given, so not null."""
UNSET: Final = None
"""A test of a value: it is null."""
TEXT: Final = "="
"""A mark for `On.shown`: it shows the value itself, for example that of ``required_columns.routes``."""


@dataclass(frozen=True, slots=True)
class On:
    """A condition on one key.

    In a path, ``*`` is each entry of a mapping or list, as in ``eval.sets.*.min_p``. ``@`` is each entry of a mapping
    whose names are full paths of sections, as in ``environments@max_tokens``. In one row, the same mapping up to ``*``
    or ``@`` stands for the same entry. A path that begins with ``shape.`` reads the model's shape.
    """

    key: str
    test: object = SET  # a value, UNSET, SET, Not, OneOf, Has, Above or Below
    shown: str | None = None  # the key to name in messages, if ``key`` is derived from it; TEXT: the value says it

    def matches(self, root: object, bound: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yields the name of each matching key in a message, with the entries that its ``*`` and ``@`` stand for."""
        for name, value, entries in found_keys(root, self.key, bound):
            if _holds(root, value, self.test, entries):
                yield self._named(root, name, value, entries), entries

    def _named(self, root: object, name: str, value: object, bound: Mapping[str, str]) -> str:
        if self.shown == TEXT:
            return str(value)
        names = [f"{name}={as_given(self.test.value if isinstance(self.test, Has) else value)}"]
        if self.shown is not None:
            names = [f"{shown}={as_given(one)}" for shown, one, _ in found_keys(root, self.shown, bound)]
        if isinstance(self.test, Above | Below) and isinstance(limit := self.test.limit, str):
            names += [f"{limit_name}={as_given(one)}" for limit_name, one, _ in found_keys(root, limit, bound)]
        return " and ".join(names)

    def unmatched(self, root: object, bound: Mapping[str, str]) -> str:
        """Returns the name of the key in a message if no value of it matches."""
        values = [self._named(root, name, value, entries) for name, value, entries in found_keys(root, self.key, bound)]
        return " and ".join(values) or f"no {self.key}"


Condition = On | tuple[On, ...]
"""One condition, or several that hold together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excludes:
    """Two choices that do not go together, each of one key or of several."""

    one: Condition
    other: Condition = ()
    why: str
    fix: str
    where: When = "config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A choice that needs all of some others."""

    when: Condition
    all: Condition
    why: str
    fix: str
    where: When = "config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadIf:
    """Keys, or sections, that something reads if any of some conditions holds; otherwise, if set, they do nothing."""

    keys: tuple[str, ...]
    any_of: tuple[On, ...]
    why: str
    where: When = "config"


@dataclass(frozen=True, slots=True)
class CheckFunction:
    """A rule that needs code: a function from the configuration, with ``where="shape"`` also from the model's shape, to
    a line for each problem."""

    does: Callable[..., Iterable[str]]
    where: When = "config"


Rule = Excludes | Needs | ReadIf | CheckFunction


def excluded(one: Condition, *others: tuple[Condition, str, str], where: When = "config") -> Iterator[Rule]:
    """A row for each of ``others`` with its reason and its fix."""
    return (Excludes(one=one, other=other, why=why, fix=fix, where=where) for other, why, fix in others)


@dataclass(frozen=True, slots=True)
class _Root:
    config: object
    shape: object

    def __getattr__(self, name: str) -> object:
        return getattr(self.config, name)


def read_with_reference(*keys: str) -> ReadIf:
    """The row of keys of the reference model, in the configuration and in features."""
    any_of = (
        On("algorithm.kl.coefficient", Above(0)),
        On("algorithm.needs_reference", True, "algorithm.preference.reference_free"),
        On("kind.reference", True, "job"),
    )
    return ReadIf(keys=keys, any_of=any_of, why="no reference is loaded")


def broken(rules: Iterable[Rule], config: object, where: When = "config", shape: object = None) -> list[str]:
    """A line for each rule of ``where`` that the configuration breaks: the keys with their values, why, and the fix.

    ``shape``: the model's, which rows with ``where="shape"`` read. Equal lines are one.
    """
    root, lines = _Root(config, shape), dict[str, None]()
    unread, leaves = dict[str, None](), dict[str, Mapping[str, Leaf]]()
    for rule in (rule for rule in rules if rule.where == where):
        match rule:
            case CheckFunction():
                lines |= dict.fromkeys(rule.does(config, shape) if where == "shape" else rule.does(config))
            case Excludes():
                for given, _ in _combinations(root, (*_all(rule.one), *_all(rule.other)), {}):
                    lines[_line(given, rule)] = None
            case Needs():
                for given, bound in _combinations(root, _all(rule.when), {}):
                    if missed := [one for one in _all(rule.all) if next(one.matches(root, bound), None) is None]:
                        lines[_line((*given, *(one.unmatched(root, bound) for one in missed)), rule)] = None
            case ReadIf():
                for name, leaf, bound in _given(root, rule.keys, leaves):
                    if name not in unread and not any(next(one.matches(root, bound), None) for one in rule.any_of):
                        unread[name] = None
                        because = " and ".join(one.unmatched(root, bound) for one in rule.any_of)
                        lines[does_nothing(name, leaf, f"with {because} {rule.why}")] = None
    return list(lines)


def _line(given: Sequence[str], rule: Excludes | Needs) -> str:
    return f"{' and '.join(dict.fromkeys(given)).replace(' and ', ' with ', 1)}: {rule.why}; {rule.fix}"


def _all(condition: Condition) -> tuple[On, ...]:
    return (condition,) if isinstance(condition, On) else condition


def _combinations(
    root: object, conditions: Sequence[On], bound: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, str]]]:
    """Yields each way in which all conditions hold: the names of their keys in messages, and the keys' entries."""
    if not conditions:
        yield (), bound
        return
    for name, entries in conditions[0].matches(root, bound):
        for others, all_entries in _combinations(root, conditions[1:], entries):
            yield (name, *others), all_entries


def found_keys(root: object, key: str, bound: Mapping[str, str]) -> Iterator[tuple[str, Any, Mapping[str, str]]]:
    """Yields the full name and the value of each key that a path matches, and the entries that its ``*`` and ``@`` are.
    Nothing for a key that the configuration's kind of data lacks. ``bound``: entries that are given."""
    return _walk(root, _path(key), 0, "", bound)


@functools.cache
def _path(key: str) -> tuple[str, ...]:
    return tuple(key.replace("@", ".@.").split("."))


def _walk(
    value: Any, path: Sequence[str], depth: int, name: str, bound: Mapping[str, str]
) -> Iterator[tuple[str, Any, Mapping[str, str]]]:
    if depth == len(path) or value is None:
        yield ".".join((name, *path[depth:])).removeprefix("."), value, bound
    elif (token := path[depth]) in ("*", "@"):
        prefix = ".".join(path[: depth + 1])
        for entry, inside in _entries(value):
            if bound.get(prefix, entry) == entry:
                inner = entry if token == "@" else f"{name}.{entry}"
                yield from _walk(inside, path, depth + 1, inner, {**bound, prefix: entry})
    elif isinstance(value, Mapping):
        if token in value:
            yield from _walk(value[token], path, depth + 1, f"{name}.{token}", bound)
    elif hasattr(value, token):
        yield from _walk(getattr(value, token), path, depth + 1, f"{name}.{token}".removeprefix("."), bound)


def _entries(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        return ((str(key), one) for key, one in value.items())
    return ((str(place), one) for place, one in enumerate(value)) if isinstance(value, Sequence) else ()


def _holds(root: object, value: Any, test: object, bound: Mapping[str, str]) -> bool:
    match test:
        case Not(value=other):
            return value is not None if other is None else bool(value != other)
        case OneOf(values=values):
            return value in values
        case Has(value=one):
            return one in value
        case Above(limit=limit) | Below(limit=limit):
            limits = [one for _, one, _ in found_keys(root, limit, bound)] if isinstance(limit, str) else [limit]
            above = isinstance(test, Above)
            return value is not None and any(value > one if above else value < one for one in limits if one is not None)
        case None:
            return value is None
    return bool(value == test)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key that is not a section: its value and its default."""

    value: object
    default: object


def set_leaves(name: str, section: BaseModel) -> Iterator[tuple[str, Leaf]]:
    """Yields, by full name, the keys of the section ``name`` and its inner sections that differ from their defaults.
    So a saved configuration, which has every key, does not set keys at their defaults."""
    values = section.__dict__
    for key, default in _defaults(type(section)).items():
        value = values[key]
        full = f"{name}.{key}" if name else key
        if isinstance(value, BaseModel):
            yield from set_leaves(full, value)
        elif isinstance(default, Mapping) and default:  # its names are declared by the package
            yield from ((f"{full}.{one}", Leaf(value[one], it)) for one, it in default.items() if value[one] != it)
        elif value is not default and value != default:
            yield full, Leaf(value, default)


def _given(
    root: _Root, keys: Sequence[str], cache: dict[str, Mapping[str, Leaf]]
) -> Iterator[tuple[str, Leaf, Mapping[str, str]]]:
    """Yields the set keys that are, or are in, one of ``keys``, with the entries that their ``*`` and ``@`` stand for.
    ``cache`` keeps the set keys of the sections that were read before."""
    for *above, last in map(_path, keys):
        for name, section, bound in _walk(root, above, 0, "", {}) if above else [("", root.config, {})]:
            if isinstance(section, BaseModel):
                if name not in cache:
                    cache[name] = dict(set_leaves(name, section))
                key = f"{name}.{last}" if name else last
                yield from ((full, leaf, bound) for full, leaf in cache[name].items() if contains_leaf(full, key))


@functools.cache
def _defaults(section: type[BaseModel]) -> Mapping[str, object]:
    """Returns a section's defaults. Cached, because pydantic copies a default at each request."""
    return {key: field.get_default(call_default_factory=True) for key, field in section.model_fields.items()}


def contains_leaf(leaf: str, key: str) -> bool:
    """True if the leaf is the key, or in the section of that name."""
    return leaf == key or leaf.startswith(f"{key}.")


def does_nothing(name: str, leaf: Leaf, reason: str) -> str:
    """Returns the problem of a set key that is not read, and what to do."""
    return (
        f"{name}={as_given(leaf.value)} does nothing: {reason}; leave it out, or set it to its default, "
        f"{as_given(leaf.default)}"
    )


def as_given(value: object) -> str:
    """Returns the value as a user writes it on a command line."""
    if isinstance(value, BaseModel):
        return as_given(value.model_dump(mode="json", exclude_defaults=True))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_given(one)}' for name, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_given, value))}]"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
