"""The table of checks, and a function that runs them all, in seconds. Without torch, no row is tokenized."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.preflight import (
    batches,
    devices,
    engine,
    job_memory,
    model_files,
    nodes,
    own_modules,
    problems_of_data,
    pushes,
    reward,
    sizes,
    versions,
)
from launcher.preflight.subject import Check, Found, Subject, found_by
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError

CHECKS: Mapping[str, Check] = {
    "sizes": sizes.check,
    "batches": batches.check,
    "own modules": own_modules.check,
    "model files": model_files.check,
    "data": problems_of_data.check,
    "devices": devices.check,
    "nodes": nodes.check,
    "memory": job_memory.check,
    "pushes": pushes.check,
    "engine": engine.check,
    "versions": versions.check,
    "reward": reward.check,
}
"""The checks by their names in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The distinct findings of all checks, in the order of the table."""

    found: tuple[Found, ...]
    seconds: float

    def texts(self, kind: str) -> list[str]:
        """The texts of the findings of one kind."""
        return [each.text for each in self.found if each.kind == kind]

    def raise_problems(self) -> None:
        """Raises ConfigError with all problems, if there are any."""
        if problems := self.texts("problem"):
            raise ConfigError("\n".join(problems))

    def notes(self) -> list[str]:
        """Lines about what the user may not want."""
        return [f"note: {text}" for text in self.texts("note")]

    def describe(self) -> str:
        """Lines to show: notes, what was checked, and what was not."""
        lines = [*self.notes(), *self.texts("fact")]
        lines.append(f"checked in {self.seconds:.1f} s: {', '.join(CHECKS)}")
        if missed := self.texts("unchecked"):
            lines.append(f"not checked: {'; '.join(missed)}")
        return "\n".join(lines)


def preflight(config: RunConfig, *, for_job: bool = False) -> Preflight:
    """Run all checks. ``for_job``: the run will be a job, on other machines."""
    began, subject = time.monotonic(), Subject(config, for_job)
    found = dict.fromkeys(one for name, check in CHECKS.items() for one in found_by(name, check(subject)))
    return Preflight(found=tuple(found), seconds=time.monotonic() - began)
