"""Runs `train` as a user does, kills one of its ranks, and lets it go on from its checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.controller.speeds import Ranked, read_ranks
from launcher.hosts.slurm.allocation import Allocation
from launcher.processes.last_words import end_of
from launcher.rehearsal.sizes import STEPS
from rl_megatron.errors import RLMegatronError
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.metrics.table import STEPS as PHASES_OF_STEPS

_LOOK_SECONDS = 0.2
_END_SECONDS = 60.0
_KILL_SECONDS = 60.0


class NotReached(RLMegatronError):
    """The run ended, or its time was up, before what was waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAttempt:
    """The first attempt: seconds to its first step, which rank was killed, and seconds until the run said so."""

    ready: float
    killed: Ranked | None  # None: a run of one rank does not compare ranks, so nobody knows its process
    noticed: float | None
    named: bool  # whether the run's error names the killed rank


@dataclass(slots=True, kw_only=True)
class RehearsedRun:
    """The attempts of the run in ``folder``, by the configuration ``file``."""

    file: Path
    folder: Path
    allocation: Allocation | None

    def rows(self) -> list[Mapping[str, Any]]:
        """The rows of metrics of the steps so far, from the first on."""
        path = self.folder / "metrics.jsonl"
        rows = read_jsonl(path) if path.is_file() else []
        return [row for row in rows if row["phase"] in PHASES_OF_STEPS and row["step"]]

    def start(self, limit: float) -> FirstAttempt:
        """Make the first steps, each with its checkpoint, and kill the last rank. Raises NotReached."""
        began = time.monotonic()
        with self._train("start") as run:
            self._until(run, "start", lambda: self._made(1), limit, "the first step")
            ready = time.monotonic() - began - self._spent(1)
            saved = self.folder / "checkpoints" / f"step_{STEPS:06d}"
            left = limit - (time.monotonic() - began)
            self._until(run, "start", lambda: self._made(STEPS) and saved.is_dir(), left, f"step {STEPS}'s checkpoint")
            ranks = read_ranks(self.folder / "ranks.txt")
            if not ranks:
                _interrupt(run)
                return FirstAttempt(ready=ready, killed=None, noticed=None, named=False)
            victim = max(ranks, key=lambda each: each.rank)
            killed = time.monotonic()
            self._kill(victim)
            try:
                run.wait(max(limit - (killed - began), _END_SECONDS))
            except subprocess.TimeoutExpired as error:
                raise NotReached(f"rank {victim.rank} on {victim.node} was killed, and the run went on") from error
            noticed = time.monotonic() - killed
        named = f"rank {victim.rank} " in end_of(self._output("start"))
        return FirstAttempt(ready=ready, killed=victim, noticed=noticed, named=named)

    def resume(self, limit: float) -> float:
        """Go on from the checkpoint for one step. Returns the seconds until that step began. Raises NotReached."""
        began, before = time.monotonic(), self.rows()  # some may be of steps that no checkpoint holds

        def again() -> list[Mapping[str, Any]]:
            return [row for row in self.rows() if row not in before]

        with self._train("resume") as run:
            self._until(run, "resume", lambda: bool(again()), limit, "a step after the resume")
            seconds = time.monotonic() - began - sum(float(row["seconds/step"]) for row in again())
            _interrupt(run)
        return seconds

    def _made(self, step: int) -> bool:
        rows = self.rows()
        return bool(rows) and rows[-1]["step"] >= step

    def _spent(self, first: int) -> float:
        """Seconds of the steps from ``first`` on."""
        return sum(float(row["seconds/step"]) for row in self.rows() if row["step"] >= first)

    def _output(self, which: str) -> Path:
        return self.folder / "rehearsal" / f"{which}.txt"

    @contextlib.contextmanager
    def _train(self, which: str) -> Iterator[subprocess.Popen[bytes]]:
        """The run, whose output goes to a file; it is ended on leaving."""
        command = [sys.executable, "-P", "-m", "launcher", "train", "--config", str(self.file), "--resume"]
        with self._output(which).open("wb") as output:
            run = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(os.environ)
            )
        try:
            yield run
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.terminate()
                run.wait(_END_SECONDS)
            run.kill()
            run.wait()

    def _until(
        self, run: subprocess.Popen[bytes], which: str, true: Callable[[], bool], limit: float, what: str
    ) -> None:
        end = time.monotonic() + limit
        while not true():
            if run.poll() is not None and not true():
                raise NotReached(f"the run ended before {what};{end_of(self._output(which))}")
            if time.monotonic() > end:
                raise NotReached(f"{what} was not reached in {limit:.0f} s;{end_of(self._output(which))}")
            time.sleep(_LOOK_SECONDS)

    def _kill(self, victim: Ranked) -> None:
        if self.allocation is None:
            os.kill(victim.pid, signal.SIGKILL)
            return
        command = self.allocation.on(victim.node, ["kill", "-KILL", str(victim.pid)])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_KILL_SECONDS, env=dict(os.environ))
        except subprocess.TimeoutExpired as error:
            raise NotReached(f"srun did not reach {victim.node} in {_KILL_SECONDS:.0f} s to kill a rank") from error
        if done.returncode:
            raise NotReached(f"rank {victim.rank} on {victim.node} could not be killed: {done.stderr.strip()[:300]}")


def _interrupt(run: subprocess.Popen[bytes]) -> None:
    """End the run at once: after a request to stop, as before a job's end, Ctrl-C waits for no checkpoint. It exports
    no model."""
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.send_signal(number)
            run.wait(1.0)
            return
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(_END_SECONDS)
