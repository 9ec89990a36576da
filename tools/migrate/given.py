"""Types of a file of another framework: its keys with their values and lines, and results of conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from rl_megatron.errors import ConfigError

SKIP: Final = object()
"""The result of a conversion that writes nothing: our default, or another key, has the same effect."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a file gives a key, and the line that gives it."""

    value: object
    line: int
    unresolved: tuple[str, ...] = ()
    """Parts of the value that only the shell or the program knows, such as ``$HOME``. They stand in ``value`` as text.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The keys that a file sets, by their full names in the framework."""

    framework: str
    """``verl``, ``TRL`` or ``slime``."""
    values: Mapping[str, Value]
    notes: tuple[str, ...] = field(default=())
    """Sentences for the user about what the reader saw besides keys, each with its line."""


class Reader(Protocol):
    """Reads the files of one framework. A module of ``tools/migrate`` has these functions; it executes nothing."""

    FRAMEWORK: str
    """The name of its tables and of `Given.framework`."""

    def recognizes(self, text: str, path: Path) -> bool:
        """True if the file is one of this framework."""

    def read(self, text: str, path: Path) -> Given:
        """Returns the keys of the file. Raises ConfigError, with the line, for text that it cannot read."""


@dataclass(frozen=True, slots=True)
class ToSet:
    """The result of a conversion that the user must complete."""

    value: object
    """The value to write, or `SKIP`."""
    advice: str
    """A sentence that says what to set, and why."""


class NoCounterpart(ConfigError):
    """A value that changes the loss and that no value here reproduces. The text is a sentence with the reason."""
