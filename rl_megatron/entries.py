"""Loads what packages declare as entry points: features, observers, commands and checks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rl_megatron.errors import ConfigError, RLMegatronError

PLANNER = "rl_megatron.planner"
"""The group of what a run asks the planner: functions of its configuration and its model's shape."""
_OWN = "rl-megatron"  # the distribution of this package
_AGAIN = "install this package again, in a checkout by pip install -e ."


def declared(kind: str, group: str, *, own: bool = False) -> Mapping[str, EntryPoint]:
    """Entry points of a group, each a ``kind``, by name in alphabetical order.

    Raises ConfigError if two have one name; with ``own``, if this package declares none: what was installed of it is
    older than its code, or nothing was.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        if entry.name in found:
            said = describe_entry(kind, entry)
            raise ConfigError(f"{said} has the name of another {kind}; rename it, or uninstall one of them")
        found[entry.name] = entry
    if own and not any(_is_own(entry) for entry in found.values()):
        raise ConfigError(f"the installed {_OWN} has no entry points in {group}: it is older than this code; {_AGAIN}")
    return found


def load_entry(kind: str, entry: EntryPoint) -> Any:
    """The object of an entry point. Raises ConfigError that names its package if it cannot be loaded."""
    try:
        return entry.load()
    except RLMegatronError:
        raise
    except Exception as error:  # a package of the user's may raise anything
        advice = _AGAIN if _is_own(entry) else "fix or uninstall it"
        raise ConfigError(f"{describe_entry(kind, entry)} cannot be loaded: {error!r:.500}; {advice}") from error


def load_own(group: str, name: str) -> Any:
    """The object that this package declares by ``name``. Raises ConfigError if what was installed of it has none."""
    found = declared("function", group)
    if name not in found:
        raise ConfigError(f"the installed {_OWN} has no {name!r} in {group}: it is older than this code; {_AGAIN}")
    return load_entry("function", found[name])


def entry_package(entry: EntryPoint) -> str:
    """The name of the package that declares an entry point."""
    return entry.dist.name if entry.dist else "a package"


def _is_own(entry: EntryPoint) -> bool:
    return entry_package(entry) == _OWN


def describe_entry(kind: str, entry: EntryPoint) -> str:
    """An entry point in words, with its package."""
    return f"the {kind} {entry.name!r} that {entry_package(entry)} brings ({entry.value})"
