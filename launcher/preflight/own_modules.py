"""Checks that the user's own layers, objective, advantages and pair loss exist, without importing their packages: that
may take seconds, or need a GPU."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.config.reads import READS
from rl_megatron.config.sections.algorithm import PAIR_LOSS_NAMES

_BIND_UNSEEN = frozenset(
    {"__dict__", "__getattr__", "exec", "f_globals", "globals", "locals", "modules", "setattr", "vars"}
)
"""Names of a module's text by which it may have others that are not written in it."""


def check(subject: Subject) -> Iterator[Found]:
    """Yields a problem if ranks could not find a module or its object, as far as that shows without an import."""
    config = subject.config
    named = {"learner.layers": config.learner.own_layers}
    for section in (config.dpo, config.algorithm.preference):
        named[f"{section.key}.loss"] = _own(section.loss, PAIR_LOSS_NAMES)
    for key in ("objective", "advantage_mean"):
        named[f"algorithm.{key}"] = _own(getattr(config.algorithm, key), READS[key])
    for key, own in named.items():
        if own is None:
            continue
        if subject.other_python is None and (said := _not_there(own)):
            yield problem(f"{key}={own}: {said}")
        else:
            yield unchecked(f"{key}={own}, which ranks import")


def _own(name: str, known: Collection[str]) -> str | None:
    return None if name in known else name


def _not_there(own: str) -> str:
    """What of ``package.module:name`` ranks would not find, and what to do; or empty. ``__main__`` is another module in
    ranks."""
    module, _, name = own.partition(":")
    spec: ModuleSpec | None = None
    for end in (place for place, sign in enumerate(f"{module}.") if sign == "."):
        part = module[:end]
        parent, spec = spec, _below(spec, part) if spec else _top(part)
        if spec is None and parent and (part in sys.modules or _has_unseen(parent)):
            return ""
        if spec is None:
            return f"no module {part!r}; install it or put its folder on PYTHONPATH"
    assert spec is not None
    names = _names(Path(spec.origin)) if spec.origin and spec.origin.endswith(".py") else None
    if names is None or name in names:
        return ""
    near = difflib.get_close_matches(name, names, 1)
    return f"{name!r} of {module} is not there" + (f"; did you mean {near[0]!r}?" if near else "")


def _top(package: str) -> ModuleSpec | None:
    return None if package == "__main__" else importlib.util.find_spec(package)


def _below(parent: ModuleSpec, part: str) -> ModuleSpec | None:
    """By its last name alone: with dots, a folder without __init__.py is only found below a parent that is imported."""
    return PathFinder.find_spec(part.rpartition(".")[2], [*(parent.submodule_search_locations or ())])


def _has_unseen(parent: ModuleSpec) -> bool:
    """Whether a module may have others below it that are not files in its folders."""
    if not all(Path(folder).is_dir() for folder in parent.submodule_search_locations or ()):
        return True
    if parent.origin is None:
        return False
    try:
        text = Path(parent.origin).read_bytes()
    except OSError:
        return True
    return not parent.origin.endswith(".py") or b"__path__" in text or b"sys.modules" in text


def _names(file: Path) -> set[str] | None:
    """What a module's text binds anywhere; None where it may bind more, or cannot be read, as an import would say."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return None
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    aliases = [one for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
    names |= {one.asname or one.name.partition(".")[0] for one in aliases}
    names |= {str(node.name) for node in nodes if isinstance(node, ast.MatchAs | ast.MatchStar)}
    names |= {str(node.rest) for node in nodes if isinstance(node, ast.MatchMapping)}
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return None if "*" in names or _BIND_UNSEEN & (names | read) else names
