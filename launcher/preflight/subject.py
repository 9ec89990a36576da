"""The subject of a check, and the findings that it yields."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from launcher.build.model import starting_shape
from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import ModelShape


@dataclass(frozen=True)
class Subject:
    """A configuration to run here or, with ``for_job``, in a job that is submitted from here."""

    config: RunConfig
    for_job: bool

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model that the run starts from. Raises ConfigError."""
        return starting_shape(self.config)

    @property
    def other_python(self) -> str | None:
        """The interpreter of the controller if it is not this one: the key and its value."""
        slurm = self.config.slurm
        if not self.for_job or slurm.python in (None, sys.executable):
            return None
        return f"slurm.python={slurm.python}"

    @property
    def model_folder(self) -> Path | None:
        """The configured model folder; None for a tiny model."""
        return self.config.model.path


@dataclass(frozen=True, slots=True)
class Found:
    """One finding: a problem that prevents the run, a note, a fact, or something that was not checked."""

    kind: Literal["problem", "note", "fact", "unchecked"]
    text: str


Check = Callable[[Subject], Iterator[Found]]
"""Yields findings about a run here or a job. An RLMegatronError that it raises counts as a problem."""


def problem(text: str) -> Found:
    """A reason why the run cannot start, and what to do."""
    return Found("problem", text)


def note(text: str) -> Found:
    """Something that the run does and its user may not want."""
    return Found("note", text)


def fact(text: str) -> Found:
    """A fact, to show on request."""
    return Found("fact", text)


def unchecked(text: str) -> Found:
    """Something that cannot be checked here."""
    return Found("unchecked", text)
