"""The table of checks, and a function that runs them all, in seconds. Without torch, no row is tokenized."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.preflight import devices, engine, model_files, own_code, problems_of_data, sinks, sizes
from launcher.preflight.subject import Check, Finding, PreflightContext, run_check, unchecked
from rl_megatron.config.run import RunConfig
from rl_megatron.entries import declared, describe_entry, load_entry
from rl_megatron.errors import ConfigError

CHECKS: Mapping[str, Check] = {
    "sizes": sizes.check,
    "batches": sizes.check_batches,
    "own modules": own_code.check_modules,
    "model files": model_files.check,
    "data": problems_of_data.check,
    "devices": devices.check,
    "nodes": devices.check_nodes,
    "sinks": sinks.check,
    "engine": engine.check,
    "versions": engine.check_versions,
    "reward": own_code.check,
}
"""The checks by their names in messages. Checks of tools and of other packages come before the last three."""
_LAST = ("engine", "versions", "reward")  # they start programs or call functions of the user
GROUP = "rl_megatron.checks"


def checks() -> Mapping[str, Check]:
    """Returns all checks. Raises ConfigError if one of an entry point cannot be loaded, or has the name of another."""
    found = {name: check for name, check in CHECKS.items() if name not in _LAST}
    for name, entry in declared("check", GROUP, own=True).items():
        if name in CHECKS:
            raise ConfigError(f"{describe_entry('check', entry)} has the name of another; rename it, or uninstall it")
        found[name] = load_entry("check", entry)
    return found | {name: check for name, check in CHECKS.items() if name in _LAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The distinct findings of all checks, in the order of the table."""

    found: tuple[Finding, ...]
    seconds: float
    names: tuple[str, ...] = ()  # names of the checks

    def texts(self, kind: str) -> list[str]:
        """Returns the texts of the findings of one kind."""
        return [each.text for each in self.found if each.kind == kind]

    def raise_problems(self) -> None:
        """Raises ConfigError with all problems, if there are any."""
        if problems := self.texts("problem"):
            raise ConfigError("\n".join(problems))

    def notes(self) -> list[str]:
        """Returns lines about what the user may not want."""
        return [f"note: {text}" for text in self.texts("note")]

    def describe(self) -> str:
        """Returns lines to show: notes, what was checked, and what was not."""
        lines = [*self.notes(), *self.texts("fact")]
        lines.append(f"checked in {self.seconds:.1f} s: {', '.join(self.names)}")
        if missed := self.texts("unchecked"):
            lines.append(f"not checked: {'; '.join(missed)}")
        return "\n".join(lines)


_ON_THE_CLUSTER = ("model files", "data", "engine", "versions")


def preflight(config: RunConfig, *, for_job: bool = False, tries: bool = False, off_cluster: bool = False) -> Preflight:
    """Runs all checks. ``for_job``: the run will be a job, on other machines. ``tries`` and ``off_cluster`` as in
    `PreflightContext`."""
    began, subject = time.monotonic(), PreflightContext(config, for_job, tries, off_cluster)
    left_out = {name: lambda _, name=name: iter([unchecked(name)]) for name in _ON_THE_CLUSTER if off_cluster}
    each = {**checks(), **left_out}
    found = dict.fromkeys(one for name, check in each.items() for one in run_check(name, check(subject)))
    return Preflight(
        found=tuple(found), seconds=time.monotonic() - began, names=tuple(name for name in each if name not in left_out)
    )
