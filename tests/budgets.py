"""Counts what the project has: lines and files, keys, commands, make targets, metrics, pages and words.

``python -m tests.budgets`` writes tests/budgets.yaml with the counts of today, where none has grown. Only a decision in
docs/how_it_works.md raises a budget, by hand.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from launcher.__main__ import _COMMANDS, GROUP
from rl_megatron.config.errors import _inside as inside
from rl_megatron.config.run import RunConfig
from rl_megatron.observability.metrics import METRICS
from rl_megatron.section import Section

REPO = Path(__file__).resolve().parents[1]
FILE = REPO / "tests/budgets.yaml"
PRODUCT = ("rl_megatron", "launcher", "tools")
GENERATED = ("docs/configuration.md", "docs/metrics.md", "docs/commands.md", "docs/migrating.md")


def counts() -> dict[str, int]:
    """Every count by its name, rooms of the product by their folder."""
    return {
        **_lines(),
        "keys": len(set(_definitions(RunConfig, set()))),
        "commands": len(_COMMANDS) + sum("." not in name for name in _entries(GROUP)),
        "make targets": len(re.findall(r"^# make ", (REPO / "Makefile").read_text(), re.M)),
        "metrics": len(METRICS),
        **_documents(),
    }


def _entries(group: str) -> dict[str, str]:
    """The entry points that pyproject.toml declares in a group."""
    return dict(tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["entry-points"][group])


def _lines() -> dict[str, int]:
    """Lines of Python by room, of the product and of tests; files of both."""
    rooms, files, totals = Counter[str](), Counter[str](), Counter[str]()
    for path in _tracked("*.py"):
        top = path.parts[0]
        if top not in (*PRODUCT, "tests", "bench"):
            continue
        count = (REPO / path).read_bytes().count(b"\n")
        kind = "product" if top in PRODUCT else top
        totals[f"lines of {kind}"] += count
        files[f"files of {kind}"] += 1
        if top in PRODUCT:
            rooms["/".join(path.parts[: min(2, len(path.parts) - 1)])] += count
    return {**dict(sorted(rooms.items())), **totals, **files}


def _documents() -> dict[str, int]:
    """Pages of documentation that people write, and their words."""
    pages = [path for path in _tracked("*.md") if str(path) not in GENERATED and path.parts[0] != "tests"]
    return {"pages": len(pages), "words": sum(len((REPO / path).read_text().split()) for path in pages)}


def _definitions(section: type[Section], seen: set[type[Section]]) -> Iterator[tuple[str, str]]:
    """The class that first defines each key with a value, and its name; a key of several sections counts once."""
    if section in seen:
        return
    seen.add(section)
    for name, field in section.model_fields.items():
        inner, variants = inside(field)
        if below := [one for one in (inner, *variants.values()) if one is not None]:
            for one in below:
                yield from _definitions(one, seen)
        else:
            owner = next(c for c in reversed(section.__mro__) if name in inspect.get_annotations(c))
            yield f"{owner.__module__}.{owner.__qualname__}", name


def _tracked(pattern: str) -> list[Path]:
    """Files that git tracks, or would; all of them where there is no repository, as in an archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", pattern], cwd=REPO, capture_output=True, text=True
    )
    names = listed.stdout.split("\n") if listed.returncode == 0 else map(str, REPO.rglob(pattern))
    return sorted({Path(name) for name in names if name and (REPO / name).is_file()})


def main() -> None:
    """Writes the file, unless a count has grown."""
    now, budgets = counts(), yaml.safe_load(FILE.read_text()) if FILE.is_file() else {}
    grown = [
        f"{name}: {now[name]}, budget {budgets[name]}" for name in now.keys() & budgets if now[name] > budgets[name]
    ]
    grown += [f"{name}: {now[name]}, no budget" for name in now.keys() - budgets if budgets]
    if grown:
        raise SystemExit("\n".join(["a decision in docs/how_it_works.md raises a budget, by hand:", *sorted(grown)]))
    FILE.write_text(yaml.safe_dump(now, sort_keys=False))


if __name__ == "__main__":
    main()
