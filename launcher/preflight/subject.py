"""The subject of a check, and the findings that it yields."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher.build.model import starting_shape
from launcher.processes import limits
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.weights.formats.hf_folder import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreflightContext:
    """A configuration to run here or, with ``for_job``, in a job that is submitted from here."""

    config: RunConfig
    for_job: bool
    tries: bool = False  # a process tries custom losses and environments, which takes seconds
    off_cluster: bool = False  # files of the cluster are not on this machine

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model that the run starts from. Raises ConfigError."""
        return starting_shape(self.config, off_cluster=self.off_cluster)

    @property
    def environment(self) -> Mapping[str, str]:
        """The controller's, as far as it is known here."""
        return {**os.environ, **(self.config.slurm.environment if self.for_job else {})}

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

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The run's tokenizer; None if the model's folder has none, or torch is not installed here. Raises ConfigError
        if it cannot be read."""
        folder, variables = self.model_folder, self.config.model.template_variables
        try:
            from launcher.build.data import read_tokenizer
        except ImportError:
            return None
        if folder is None:
            return byte_tokenizer()
        return read_tokenizer(folder, variables) if has_tokenizer(folder) else None

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion, where ``tokenizer`` is not None. Raises ConfigError."""
        from launcher.build.data import stop_token_ids

        assert self.tokenizer is not None
        if self.model_folder is None:
            return (int(self.tokenizer.eos_token_id),)
        return stop_token_ids(self.model_folder, self.tokenizer, self.shape.vocab_size)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: a problem that prevents the run, a note, a fact, or something that was not checked."""

    kind: Literal["problem", "note", "fact", "unchecked"]
    text: str


Check = Callable[[PreflightContext], Iterator[Finding]]
"""Yields findings about a run here or a job. An error that it raises is a problem (`run_check`)."""


def run_check(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yields the findings of the check ``name`` or of a part of it, then the error that ends them, as a problem. So
    earlier findings, and those of other checks, are reported too."""
    try:
        yield from findings
    except RLMegatronError as error:
        yield problem(str(error))
    except Exception as error:
        said = limits.refusal(error) if isinstance(error, OSError | RuntimeError) else None
        if said is None:
            logger.exception("the check of %s did not end", name)
        yield problem(said or f"the check of {name} raised {type(error).__name__}: {error}; its traceback is above")


def problem(text: str) -> Finding:
    """Returns the finding of a problem: why the run cannot start, and what to do."""
    return Finding("problem", text)


def note(text: str) -> Finding:
    """Returns the finding of something that the run does and its user may not want."""
    return Finding("note", text)


def fact(text: str) -> Finding:
    """Returns the finding of a fact, to show on request."""
    return Finding("fact", text)


def unchecked(text: str) -> Finding:
    """Returns the finding of something that cannot be checked here."""
    return Finding("unchecked", text)
