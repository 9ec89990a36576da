"""Reads tools/migrate/tables: our keys by section, and for each framework its keys, defaults and conversions.

``keys.yaml`` lists our keys in the order of docs/migrating.md. ``verl.yaml``, ``trl.yaml`` and ``slime.yaml`` say which
keys of theirs give each of ours. ``areal.yaml`` and ``nemo_rl.yaml`` have text for the page alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rl_megatron.config import yaml_text

FOLDER = Path(__file__).parent / "tables"
FRAMEWORKS = {"verl": "verl", "AReaL": "areal", "TRL": "trl", "slime": "slime", "NeMo-RL": "nemo_rl"}
"""The file of each framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OurKey:
    """One of our keys: a row of the page."""

    name: str
    section: str
    """The heading of the page's table."""
    changes_loss: bool
    """True if a default of theirs is written even if their file does not name the key."""
    note: int | None = None
    here: str | None = None
    """The cell of the page, if it is more than the key and its default."""
    hidden: bool = False
    """True if the cell of another key names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A rule that computes one of our keys from keys of a framework."""

    sources: tuple[str, ...] = ()
    defaults: tuple[object, ...] = ()
    """The framework's default of each source."""
    how: str | None = None
    """The name of the function that converts the values; None takes the first value as it is."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Their values and ours, for a key with few values."""
    constant: object = None
    """Our value, if no key of theirs gives it."""
    always: bool = False
    """True if the value is written without a key in their file, as for the device."""
    when: Mapping[str, object] = field(default_factory=dict)
    """Keys of theirs and the values under which the cell holds."""
    text: str | None = None
    """The cell of the page, if it is more than the source and its default."""
    why: str | None = None
    """The comment of a constant."""

    @property
    def converts(self) -> bool:
        """True if the cell gives a value, not only text."""
        return bool(self.sources) or self.constant is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of ``conf/algorithm/`` or a job, and the keys of theirs that choose it."""

    row: str | None
    when: Mapping[str, object] | None = None
    """None: a line of the page alone."""
    set: Mapping[str, object] = field(default_factory=dict)
    """Our keys that belong to the choice."""
    note: str | None = None
    """A sentence for the user on how the loss differs."""
    refuse: str | None = None
    """The reason for which the choice cannot be imported."""
    text: str | None = None
    title: str | None = None
    """The row of the page's first table; None: that of ``row``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """Keys of theirs that have none here."""

    keys: tuple[str, ...]
    """Full names; a ``*`` at the end stands for all that begin so."""
    why: str
    changes_loss: bool = False
    """True if a value other than those of ``harmless`` cannot be imported."""
    harmless: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The table of one framework."""

    name: str
    rows: tuple[Row, ...]
    cells: Mapping[str, tuple[Cell, ...]]
    """Our key -> its cells; the first one counts that has its ``when``."""
    without: tuple[Without, ...]
    renamed: Mapping[str, str]
    """Older names of theirs -> the name in this table."""
    defaults: Mapping[str, object]
    """The default of each key of theirs that a cell or a row reads."""
    trainers: Mapping[str, Mapping[str, object]]
    """Defaults that depend on the trainer, by its class."""
    shortened: Mapping[str, str]
    """Beginnings of names on the page -> in full."""


@functools.cache
def our_keys() -> Mapping[str, OurKey]:
    """Our keys in the order of the page."""
    found: dict[str, OurKey] = {}
    for section in _read("keys")["sections"]:
        for name, given in section["keys"].items():
            more = {key: value for key, value in given.items() if key != "loss"}
            loss = given.get("loss", section.get("loss", False))
            found[name] = OurKey(name=name, section=section["title"], changes_loss=loss, **more)
    return found


def algorithm_titles() -> Mapping[str, str]:
    """The rows of the page's first table, by their short names."""
    return cast(Mapping[str, str], _read("keys")["algorithms"])


@functools.cache
def framework(name: str) -> Framework:
    """Returns the table of a framework by its name."""
    tree = _read(FRAMEWORKS[name])
    shortened = tree.get("shortened", {})
    cells = {
        key: tuple(_cell(one, shortened) for one in (given if isinstance(given, list) else [given]))
        for key, given in tree.get("keys", {}).items()
    }
    rows = [
        Row(**{**given, "when": given.get("when") and _full(given["when"], shortened)})
        for given in tree.get("algorithms", ())
    ]
    defaults = _full(tree.get("defaults", {}), shortened)
    every = [one for several in cells.values() for one in several]
    for cell in sorted(every, key=lambda one: not one.when):  # one for some files has defaults of these alone
        defaults |= dict(zip(cell.sources, cell.defaults, strict=False))
    return Framework(
        name=name,
        rows=tuple(rows),
        cells=cells,
        without=tuple(_without(tree.get("without", ()), shortened)),
        renamed={_longer(old, shortened): _longer(new, shortened) for old, new in tree.get("renamed", {}).items()},
        defaults=defaults,
        trainers=tree.get("trainers", {}),
        shortened=shortened,
    )


def _cell(given: Mapping[str, Any], shortened: Mapping[str, str]) -> Cell:
    tree = dict(given)
    sources, default = tree.pop("from", ()), tree.pop("default", None)
    several = isinstance(sources, list)
    return Cell(
        sources=tuple(_longer(one, shortened) for one in (sources if several else [sources] if sources else ())),
        defaults=tuple(default or ()) if several else (default,),
        how=tree.pop("as", None),
        when=_full(tree.pop("when", {}), shortened),
        **tree,
    )


def _without(entries: Sequence[Mapping[str, Any]], shortened: Mapping[str, str]) -> Iterator[Without]:
    for given in entries:
        tree = dict(given)
        yield Without(
            keys=tuple(_longer(one, shortened) for one in tree.pop("keys")),
            harmless=tuple(tree.pop("harmless", ())),
            changes_loss=tree.pop("loss", False),
            **tree,
        )


def _full(keys: Mapping[str, object], shortened: Mapping[str, str]) -> dict[str, object]:
    return {_longer(key, shortened): value for key, value in keys.items()}


def _longer(key: str, shortened: Mapping[str, str]) -> str:
    """Returns a key in full: ``A.clip_ratio`` is ``actor_rollout_ref.actor.clip_ratio``."""
    for short, full in shortened.items():
        if key.startswith(short):
            return full + key.removeprefix(short)
    return key


def _read(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], yaml_text.read(FOLDER / f"{name}.yaml"))
