"""Generates docs/migrating.md from the tables: ``python -m tools.migrate.docs > docs/migrating.md``.

``tables/page.txt`` has the text around them, with a line ``@@verl@@`` where the tables of verl stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.migrate.core import find_value, is_same, load_text
from tools.migrate.given import SKIP
from tools.migrate.tables import (
    FOLDER,
    FRAMEWORKS,
    Cell,
    Framework,
    OurKey,
    algorithm_titles,
    framework,
    our_keys,
)

_NONE = "—"
_FILES = "data:\n  type: files\n  train: a.jsonl\n  eval: b.jsonl\n"


def render() -> str:
    """Returns the page."""
    text = (FOLDER / "page.txt").read_text(encoding="utf-8")
    defaults = load_text(_FILES).model_dump(mode="json")
    for name in FRAMEWORKS:
        text = text.replace(f"@@{name}@@\n", "".join(_tables(framework(name), defaults)))
    return text


def _tables(table: Framework, defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yields the tables of a framework: rows of algorithms, keys by section, and its keys that have none here."""
    if table.shortened:
        pairs = (f"`{short}` stands for `{full}`" for short, full in table.shortened.items())
        yield f"In these tables {' and '.join(pairs)}.\n\n"
    if table.rows:
        yield _heading(table, "Which row") + _table(table.name, "here", _algorithms(table))
    missing: list[str] = []
    for section in dict.fromkeys(one.section for one in our_keys().values()):
        ours = [one for one in our_keys().values() if one.section == section and not one.hidden]
        cells = {one: _theirs(table, one, find_value(defaults, one.name)) for one in ours}
        if rows := [(cell, _here(one, defaults)) for one, cell in cells.items() if cell != _NONE]:
            yield _heading(table, section) + _table(f"{table.name} = default", "here = default", rows)
        missing += [_here(one, defaults) for one, cell in cells.items() if cell == _NONE]
    if table.without:
        yield _heading(table, "Keys without one here") + _table(table.name, "here", _without(table))
    if missing and table.rows:
        yield f"Keys here that {table.name} has none for: {', '.join(missing)}.\n\n"


def _heading(table: Framework, title: str) -> str:
    """A heading of the third level. It names the framework, so that each is the page's only one of its name."""
    return f"### {table.name}: {title[0].lower()}{title[1:]}\n\n"


def _table(theirs: str, here: str, rows: list[tuple[str, str]]) -> str:
    lines = [(theirs, here), ("---", "---"), *rows]
    return "".join(f"| {left} | {right} |\n" for left, right in lines) + "\n"


def _algorithms(table: Framework) -> list[tuple[str, str]]:
    """Their keys and our row, in the order of our rows."""
    shown = {row.title or row.row: _text(table, row.text, row.when) for row in table.rows if row.text or row.row}
    return [(shown[name], here) for name, here in algorithm_titles().items() if name in shown]


def _text(table: Framework, text: str | None, when: Mapping[str, object] | None) -> str:
    return text or ", ".join(f"`{_short(table, key)}={value}`" for key, value in (when or {}).items())


def _theirs(table: Framework, ours: OurKey, default: object) -> str:
    """The cell with their key and its default, which is bold if it changes the loss and differs from ours."""
    cells = [one for one in table.cells.get(ours.name, ()) if one.text or one.sources]
    plain = _plain(default) if ours.changes_loss and default is not SKIP else None
    return "; ".join(dict.fromkeys(_cell(table, one, plain) for one in cells)) or _NONE


def _cell(table: Framework, cell: Cell, ours: str | None) -> str:
    if cell.text:
        return cell.text
    direct = len(cell.sources) == 1 and cell.how is None and not cell.values and ours is not None
    mark = "**" if direct and not is_same(cell.defaults[0], ours) else ""
    pairs = [(key, cell.defaults[at] if at < len(cell.defaults) else None) for at, key in enumerate(cell.sources)]
    return ", ".join(
        f"`{_short(table, key)}`" + ("" if value is None else f" = {mark}`{_plain(value)}`{mark}")
        for key, value in pairs
    )


def _here(ours: OurKey, defaults: Mapping[str, Any]) -> str:
    if ours.here:
        return ours.here
    value = find_value(defaults, ours.name)
    default = "" if value is SKIP else f" = `{_plain(value)}`"
    return f"`{ours.name}`{default}" + (f" ({ours.note})" if ours.note else "")


def _without(table: Framework) -> list[tuple[str, str]]:
    rows = []
    for one in table.without:
        if one.why:
            keys = ", ".join(f"`{_short(table, key)}`" for key in one.keys)
            harmless = ", ".join(f"`{_plain(value)}`" for value in one.harmless)
            rows.append((keys + (f" (only {harmless})" if one.changes_loss else ""), one.why))
    return rows


def _short(table: Framework, key: str) -> str:
    """A key with its beginning abbreviated."""
    for short, full in table.shortened.items():
        if key.startswith(full):
            return short + key.removeprefix(full)
    return key


def _plain(value: object) -> str:
    """A value as a user writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value)


if __name__ == "__main__":
    print(render(), end="")
