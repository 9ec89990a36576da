"""``rl-megatron report``: writes a page about one run, or one that compares several; counts what a run has spent."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.hosts.sites import visible_gpus
from launcher.processes.environment import threads_per_worker
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import sample_note
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.observability.files import STEPS, JsonValue
from rl_megatron.observability.report import write_report
from rl_megatron.observability.timeline import write_trace
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import gpus_by_role, ranks_by_role
from rl_megatron.placement.seats import local_server_placements

logger = logging.getLogger(__name__)

ENGINES = "engines"
_DEVICES = "devices/"
_HOUR = 3600.0


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; several are compared", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="the HTML file [default: report.html in the run; of several, comparison.html]")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="also write the timeline of one run, for ui.perfetto.dev; .gz compresses it")
    ] = None,
) -> None:
    """Write an HTML page about one run, or one that compares several, into the folder of the first."""
    if trace is not None and len(runs) > 1:
        raise ConfigError(f"--trace writes the timeline of one run, but {len(runs)} folders are given; give one")
    costs = costs_of_run(runs[0]) if len(runs) == 1 else None
    page = runs[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    note, differ = (costs.note, costs.needs_differences) if costs else ("", True)
    print(write_report(runs, out or page, costs=costs, note=note, needs_differences=differ))
    if trace is not None:
        print(write_trace(runs[0], trace))


class RunCosts:
    """Adds up what the steps of rows of metrics.jsonl took, which are not kept: hours of devices by role, and tokens.

    Devices of a role are held by it all the time, but those that learner and engines share are the engines' while they
    sample (seconds/rollout). They are those of each row, which a resume may change; of rows of older versions, which
    have none, those of the configuration. No fault in the rows ends a run.
    """

    def __init__(self, config: RunConfig | RLMegatronError) -> None:
        """An error says why the configuration cannot be read."""
        self._config, self._usual = config, functools.cache(self._devices)
        self._roles = functools.lru_cache(256)(_roles_of)
        self.hours, self.warm_start = dict[str, float](), dict[str, float]()
        self.steps, self.trained, self.sampled = 0, 0.0, 0.0
        self.note = sample_note(config.data) if isinstance(config, RunConfig) else ""
        self.needs_differences = not isinstance(config, RunConfig) or config.algorithm.needs_differences
        self._why = str(config) if isinstance(config, RLMegatronError) else ""  # the hours are not counted

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts a row if it belongs to a step."""
        if self._why or row.get("seconds/step") is None or row.get("phase") not in (*STEPS, "warm_start"):
            return
        try:
            self._count(row)
        except Exception as error:
            is_ours = isinstance(error, RLMegatronError)
            logger.warning("the report cannot count the run's hours", exc_info=None if is_ours else error)
            self._why = str(error) if is_ours else f"{type(error).__name__}: {error}"

    def _count(self, row: Mapping[str, Any]) -> None:
        assert isinstance(self._config, RunConfig)
        warms_up = row["phase"] == "warm_start"
        if not warms_up:
            self.steps += 1
            self.trained += float(row.get("tokens/train") or 0.0)
            self.sampled += float(row.get("tokens/rollout") or 0.0)
        named = {role: row[name] for name, role in self._roles(tuple(row)).items()}
        counts = {role: n for role, n in named.items() if isinstance(n, int)} or self._usual()
        seconds, sampling = float(row["seconds/step"]), float(row.get("seconds/rollout") or 0.0)
        held = {role: number * seconds / _HOUR for role, number in counts.items()}
        if ENGINES not in held and self._config.kind.samples and self._config.rollout.server.addresses is None:
            held[ENGINES] = held[LEARNER] * sampling / seconds if seconds else 0.0
            held[LEARNER] -= held[ENGINES]
        into = self.warm_start if warms_up else self.hours
        for role, hours in held.items():
            into[role] = into.get(role, 0.0) + hours

    def _devices(self) -> dict[str, int]:
        assert isinstance(self._config, RunConfig)
        return devices(self._config)

    def lines(self) -> list[str]:
        """Returns lines to show at a run's end and in its report; none before its first step."""
        if self._why:
            return [f"the report cannot count the run's hours: {self._why}"]
        if not self.steps:
            return []
        assert isinstance(self._config, RunConfig)
        unit = "core" if self._config.learner.device == "cpu" else "GPU"
        total = sum(self.hours.values())
        roles = ", ".join(f"{role} {hours:,.3g}" for role, hours in self.hours.items())
        rate = f", {self.trained / total:,.0f} trained per {unit}-hour" if total else ""
        lines = [
            f"cost of {self.steps:,} {'step' if self.steps == 1 else 'steps'}: {total:,.3g} {unit}-hours ({roles}); "
            f"{self.trained:,.0f} tokens trained, {self.sampled:,.0f} sampled{rate}"
        ]
        if warm := sum(self.warm_start.values()):
            lines.append(f"  warm start before them: {warm:,.3g} {unit}-hours")
        return lines


def costs_of_run(folder: Path) -> RunCosts:
    """Returns the costs of a run's folder, which may still train; no row is added yet."""
    try:
        return RunCosts(load_config(str(folder / "config.yaml"), []))
    except RLMegatronError as error:
        return RunCosts(error)


def _roles_of(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the role of each metric that counts a role's devices. Called once for rows of the same names."""
    return {name: name.removeprefix(_DEVICES) for name in names if name.startswith(_DEVICES)}


def recorded(config: RunConfig) -> dict[str, JsonValue]:
    """Returns the fields about devices of each row: their number for each role, which a resume may change."""
    try:
        held = devices(config)
    except RLMegatronError as error:
        logger.warning("the report cannot count the run's devices: %s", error)
        held = {}
    return {f"{_DEVICES}{role}": count for role, count in held.items()}


def devices(config: RunConfig) -> dict[str, int]:
    """Returns the number of GPUs of each role that has its own, or on CPUs of the cores that its ranks compute with.

    On one machine servers that share GPUs with ranks add those that only they have to the learner's. Raises ConfigError
    if the machine has too few GPUs.
    """
    held = ranks_by_role(config)
    if config.learner.device == "cpu":
        return {role: ranks * threads_per_worker(config) for role, ranks in held.items()}
    if config.run.launcher == "slurm" or (config.run.launcher == "ray" and "SLURM_JOB_ID" in os.environ):
        return gpus_by_role(config)
    seats = () if not config.kind.samples else local_server_placements(config, len(visible_gpus()))
    sampling, training = {gpu for seat in seats for gpu in seat.gpus}, set(range(sum(held.values())))
    if sampling - training:
        whose = LEARNER if sampling & training else ENGINES
        held[whose] = held.get(whose, 0) + len(sampling - training)
    return held
