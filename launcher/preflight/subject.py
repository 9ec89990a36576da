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
    """A configuration, to be run from here or, where ``for_job``, in a job that is sent from here."""

    config: RunConfig
    for_job: bool

    @cached_property
    def shape(self) -> ModelShape:
        """Of the model that the run starts from. Raises ConfigError."""
        return starting_shape(self.config)

    @property
    def other_python(self) -> str | None:
        """What runs the controller where that is not this interpreter: the key and its value."""
        slurm = self.config.slurm
        if not self.for_job or slurm.python in (None, sys.executable):
            return None
        return f"slurm.python={slurm.python}"

    @property
    def model_folder(self) -> Path | None:
        """The folder that is given; None where a tiny model is made."""
        return self.config.model.path


@dataclass(frozen=True, slots=True)
class Found:
    """One finding: what keeps the run from starting, what its user should know or may like to, what only a run sees."""

    kind: Literal["problem", "note", "fact", "unchecked"]
    text: str


Check = Callable[[Subject], Iterator[Found]]
"""Yields what it finds, of a run here or of a job. An RLMegatronError that it raises is a problem too."""


def problem(text: str) -> Found:
    """What keeps the run from starting, and what to do."""
    return Found("problem", text)


def note(text: str) -> Found:
    """What the run does that its user may not want."""
    return Found("note", text)


def fact(text: str) -> Found:
    """What was found to be so, for who asks."""
    return Found("fact", text)


def unchecked(text: str) -> Found:
    """What cannot be seen from here."""
    return Found("unchecked", text)
