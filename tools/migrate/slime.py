"""Reads slime's launch scripts and argument files."""

from __future__ import annotations

from pathlib import Path

from tools.migrate.given import Given

FRAMEWORK = "slime"


def recognizes(text: str, path: Path) -> bool:
    """True if the file is one of slime."""
    return False


def read(text: str, path: Path) -> Given:
    """Returns the arguments of the script."""
    return Given(framework=FRAMEWORK, values={})
