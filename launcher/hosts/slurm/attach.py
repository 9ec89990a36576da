"""``rl-megatron attach``: shows the output of a run's job as it is written, until the job's end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from launcher.hosts.slurm import jobs
from rl_megatron.errors import ConfigError

_LOOK_SECONDS = 1.0
_ASK_EVERY = 5  # polls; Slurm's controller serves many users


class Tail:
    """Reads the complete lines that were added to a file since the last call; a missing file has none. One that has
    become shorter, as where logs are rotated, is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> list[str]:
        """The lines added since the last call; one without its newline comes later, whole."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            self._at = self._at if self._at <= os.fstat(file.fileno()).st_size else 0
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
        """The lines added since the last call, of all attempts, in their order."""
        lines = []
        for attempt in jobs.attempts(self._run, self._job):
            lines += self._controllers.setdefault(attempt, Tail(attempt / "controller.txt")).new()
        return self._script.new() + lines


def follow(run: Path, show: Callable[[str], None], *, seconds: float = _LOOK_SECONDS) -> bool:
    """Show the output of the run's job until its end. Returns whether it succeeded. ``seconds``: between polls.

    Where Slurm does not answer it shows why, goes on with the output, and asks again. Raises ConfigError if the run has
    no job, the job has already ended or is an array, or Slurm does not answer at the start.
    """
    job, status = jobs.current(run)
    if status.over:
        raise ConfigError(
            f"{run}: job {job} has ended: {status.text}; rl-megatron logs {shlex.quote(str(run))} shows its output"
        )
    if status.array:
        raise ConfigError(f"{run}: {jobs.runs_of(run, job)}; give one of them")
    show(f"{run}: job {job}, {status.text}; Ctrl-C leaves it running")
    follower, looks, said = Follower(run, job), 0, status.text
    while not status.over:
        for line in follower.new():
            show(line)
        time.sleep(seconds)
        looks += 1
        if looks % _ASK_EVERY == 0:
            before, (status, said) = said, _asked(job, run, status)
            if said != before:
                show(f"job {job}: {said}")
    for line in follower.new():
        show(line)
    return status.name == "COMPLETED"


def _asked(job: str, run: Path, last: jobs.Status) -> tuple[jobs.Status, str]:
    """The job's status and a text of it; the ``last`` one, and why, where Slurm does not answer."""
    try:
        status = jobs.status_of(job, run)
    except ConfigError as error:
        return last, str(error)
    return status, status.text
