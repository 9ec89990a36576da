"""Checks that the package of the user's own layers exists, without importing it, because it imports megatron."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from launcher.preflight.subject import Found, Subject, problem, unchecked


def check(subject: Subject) -> Iterator[Found]:
    """Yields a problem if ranks could not find the layers, as far as that shows without an import."""
    own = subject.config.learner.own_layers
    if own is None:
        return
    package = own.partition(":")[0].partition(".")[0]
    if subject.other_python is None and not _is_there(package):
        yield problem(f"learner.layers={own}: no module {package!r}; install it or put its folder on PYTHONPATH")
    else:
        yield unchecked(f"learner.layers={own}, which ranks import")


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # __main__, which is another module in ranks
        return False
