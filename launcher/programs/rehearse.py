"""A rehearsal, stage by stage: a stage that fails is reported, and later ones go on where they can."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from launcher.build.model import starting_shape
from launcher.build.roles import allocation_of
from launcher.rehearsal.rehearsed import FirstAttempt, RehearsedRun
from launcher.rehearsal.report import RehearsalReport
from launcher.rehearsal.settings import run_of
from launcher.rehearsal.sizes import smaller, stage_limits
from launcher.rehearsal.slow import slow_nodes, slow_ranks, unlike
from launcher.rehearsal.survey import survey
from launcher.rehearsal.table import lines_of_run, lines_of_survey
from rl_megatron.config.io import save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.durable import remove_folder
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.training.checkpoints import latest


class _TimeUp(RLMegatronError):
    """The scheduler's notice that the job's time is nearly up."""


class Rehearsal:
    """The rehearsal of ``config`` in its run's folder, where the report is written after every stage.

    Raises ConfigError if there was one, or if this is no job and the configuration needs one.
    """

    def __init__(self, config: RunConfig, *, hide_hosts: bool) -> None:
        self.folder, self._hide_hosts = config.run.dir / str(config.run.name), hide_hosts
        if (self.folder / "rehearsal.json").exists():
            raise ConfigError(f"{self.folder} holds a rehearsal; take another run.name, or remove it")
        self._config, self._inside, self._shape = config, run_of(config), starting_shape(config)
        self._limits = stage_limits(self._inside, self._shape)
        (self.folder / "rehearsal").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._allocation = allocation_of(config, self.folder)
        self._file = self.folder / "rehearsal" / "config.yaml"
        self.report = RehearsalReport(config=config, notes=list(smaller(config, self._inside)))

    def run(self) -> RehearsalReport:
        """Run all stages, and remove the checkpoints that they wrote."""
        signal.signal(signal.SIGUSR1, _time_up)
        save_resolved(self._inside, self._file)
        with self._stage("survey") as limit:
            self._survey(limit)
        run = RehearsedRun(file=self._file, folder=self.folder, allocation=self._allocation)
        started: FirstAttempt | None = None
        resumed: float | None = None
        with self._stage("start") as limit:
            started = run.start(limit)
        with self._stage("resume") as limit:
            if latest(self.folder / "checkpoints") is None:
                raise ConfigError("not tried: the first stage wrote no checkpoint")
            resumed = run.resume(limit)
        report = self.report
        report.rows = run.rows()
        of_run = lines_of_run(self._config, self._inside, self._shape, report.rows, started, resumed)
        report.lines = [*report.lines, *of_run]
        for node, what in slow_ranks(self.folder / "ranks.txt", self._inside).items():
            report.slow.setdefault(node, []).extend(what)
        if started is not None and started.killed is not None and not started.named:
            report.failures.append(f"the run's error does not name the killed rank {started.killed.rank}")
        report.write(self.folder, hide_hosts=self._hide_hosts)
        remove_folder(self.folder / "checkpoints")
        return report

    def _survey(self, limit: float) -> None:
        report = self.report
        found = survey(self._inside, self.folder / "rehearsal", self._allocation, limit)
        report.nodes, report.hosts = found.answers, sorted(set(found.by_process.values()))
        report.lines += lines_of_survey(self._config, found)
        report.slow = slow_nodes(found)
        report.notes += unlike(found)
        report.failures += [f"survey: {node}: {'; '.join(what)}" for node, what in found.failures.items()]

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[float]:
        """Run a stage, given its limit in seconds."""
        print(f"{name}: up to {self._limits[name]:.0f} s", flush=True)
        began = time.monotonic()
        try:
            yield self._limits[name]
        except (RLMegatronError, OSError) as error:
            self.report.failures.append(f"{name}: {error}")
        self.report.seconds[name] = time.monotonic() - began
        self.report.write(self.folder, hide_hosts=self._hide_hosts)


def _time_up(number: int, frame: FrameType | None) -> None:
    raise _TimeUp("the job's time is nearly up")
