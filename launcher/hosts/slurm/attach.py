"""``rl-megatron attach``: what a run's job prints, as it prints it, until the job's end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from launcher.hosts.slurm import jobs
from rl_megatron.errors import ConfigError

_LOOK_SECONDS = 1.0
_ASK_EVERY = 5  # looks; Slurm's controller has many to serve


class Tail:
    """The whole lines that were added to a file since the last look; one that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> list[str]:
        """Those lines."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()


class Follower:
    """The lines of a job's script and of the controller of its newest attempt."""

    def __init__(self, run: Path, job: str) -> None:
        self._run, self._job = run, job
        self._script = Tail(run / "jobs" / f"{job}.txt")
        self._controllers: dict[Path, Tail] = {}

    def new(self) -> list[str]:
        """What was added since the last call, over all attempts that are there, in their order."""
        lines = []
        for attempt in jobs.attempts(self._run, self._job):
            lines += self._controllers.setdefault(attempt, Tail(attempt / "controller.txt")).new()
        return self._script.new() + lines


def follow(run: Path, show: Callable[[str], None], *, seconds: float = _LOOK_SECONDS) -> bool:
    """Show what the run's job prints until its end; whether it ended well. ``seconds``: between looks.

    Raises ConfigError where the run has no job, or one that ended before.
    """
    job = jobs.job_of(run)
    status = jobs.status_of(job)
    if status.over:
        raise ConfigError(f"{run}: job {job} is over: {status.text}; rl-megatron logs {run} shows what it said")
    show(f"{run}: job {job}, {status.text}; Ctrl-C leaves it running")
    follower, looks = Follower(run, job), 0
    while not status.over:
        for line in follower.new():
            show(line)
        time.sleep(seconds)
        looks += 1
        if looks % _ASK_EVERY == 0:
            before, status = status, jobs.status_of(job)
            if status.text != before.text:
                show(f"job {job}: {status.text}")
    for line in follower.new():
        show(line)
    return status.name == "COMPLETED"
