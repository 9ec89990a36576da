"""Runs the cells of a study: real training processes side by side on this machine. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from launcher.processes.environment import die_with_parent, threads_per_worker
from launcher.runs.folder import lock
from rl_megatron.errors import ConfigError, task_group
from tools.lab import states
from tools.lab.states import CellRecord, CellStanding, CellState
from tools.lab.study import Cell, Study

_LOOK_SECONDS = 1.0  # seconds between two checks of running cells
_LINE_SECONDS = 60.0  # seconds between two lines without a terminal
_MOST_REASON = 400  # characters
_ASKED = {0, 130, -signal.SIGTERM, -signal.SIGKILL}  # exit statuses of cells that were stopped or killed
_TAIL_BYTES = 1 << 14


class Child(Protocol):
    """A process that trains one cell."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    def send_signal(self, number: int) -> None:
        """Sends a signal. Raises ProcessLookupError if the process has ended."""
        ...

    async def wait(self) -> int:
        """Waits for the end. Returns the exit status; below 0, a signal's number."""
        ...


Start = Callable[[Sequence[str], Path], Awaitable[Child]]
"""Starts ``rl-megatron`` with arguments, as leader of a session; its output is appended to a file."""


async def start_process(arguments: Sequence[str], output: Path) -> Child:
    """Starts a new interpreter, which the kernel ends with this one: a killed study leaves no running cell."""
    with output.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "launcher", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # only the study gets Ctrl-C, and passes it on
            preexec_fn=die_with_parent,
            env=dict(os.environ),
        )


async def run_cells(
    study: Study,
    cells: Sequence[Cell],
    *,
    retry: bool,
    start: Start = start_process,
    console: Console | None = None,
) -> list[CellStanding]:
    """Starts the cells that have not ended, and waits until none runs. Returns the state of each.

    Ctrl-C or SIGTERM makes every cell finish its step and save; a second one kills them. A failed cell is started only
    with ``retry``. Raises ConfigError if another process runs this study. Raises OSError, after ending the other cells,
    if a cell cannot be started or its record cannot be written, for example on a full disk.
    """
    at_once = max_running_cells(study, cells)
    with lock_study(study):
        found = states.find_states(study, cells)
        startable = {*states.STARTABLE, *([CellState.FAILED] if retry else [])}
        waiting = [each.cell for each in found if each.state in startable]
        display = _Display(
            study, cells, console or Console(markup=False), {each.cell.name: each.step for each in found}
        )
        display.note(f"{study.folder}: {states.counts(found)}; up to {at_once} at once")
        if CellState.FAILED in {each.state for each in found} and not retry:
            display.note("cells that failed are left as they are; --retry starts them again")
        series = _Series(study=study, waiting=deque(waiting), start=start, display=display)
        with _signals(series), display:
            watch = asyncio.create_task(series.watch())
            try:
                async with task_group() as group:
                    for _ in range(min(at_once, len(waiting))):
                        group.create_task(series.work())
            finally:
                watch.cancel()
        return states.find_states(study, cells)


def max_running_cells(study: Study, cells: Sequence[Cell]) -> int:
    """Returns the budget's number, or as many as the cores allow; Ray's processes count as one core of a cell.

    Raises ConfigError for several cells on the same GPUs, or on the same nodes of this process's job.
    """
    asked = study.budget.cells_at_once
    if "SLURM_JOB_ID" in os.environ and any(cell.config.run.launcher != "local" for cell in cells):
        if asked is not None and asked > 1:
            raise ConfigError(
                f"budget.cells_at_once={asked}: this is inside job {os.environ['SLURM_JOB_ID']}, and each cell would "
                "place its ranks on all of the job's nodes; allowed: 1. To run more at the same time, submit each cell "
                "(docs/evaluation.md)"
            )
        return 1
    if any(cell.config.learner.device != "cpu" for cell in cells):
        if asked is not None and asked > 1:
            raise ConfigError(
                f"budget.cells_at_once={asked}: cells on GPUs would share the same GPUs; allowed: 1. To use several, "
                "start studies of their own, each with its CUDA_VISIBLE_DEVICES"
            )
        return 1
    if asked is not None:
        return asked
    most = max(threads_per_worker(cell.config) * cell.processes + (cell.config.run.launcher == "ray") for cell in cells)
    return max(1, len(os.sched_getaffinity(0)) // most)


@dataclass(slots=True, kw_only=True)
class _Series:
    """The waiting and the running cells. ``stopping``: no further one starts."""

    study: Study
    waiting: deque[Cell]
    start: Start
    display: _Display
    running: dict[str, tuple[Cell, Child]] = field(default_factory=dict)
    stopping: bool = False
    began: float = field(default_factory=time.monotonic)
    requested: set[str] = field(default_factory=set)  # names of cells that got a signal to stop
    late: dict[str, str] = field(default_factory=dict)  # name of a cell that had to be killed -> reason

    async def work(self) -> None:
        """Runs one cell after the other until none waits."""
        while self.waiting and not self.stopping:
            await self._run(self.waiting.popleft())

    async def watch(self) -> None:
        """Shows the progress of the cells, and stops all of them when the study's time is over."""
        limit = self.study.budget.minutes
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.display.look([cell for cell, _ in self.running.values()], len(self.waiting))
            if limit is not None and not self.stopping and time.monotonic() - self.began >= 60 * limit:
                self.stop(f"budget.minutes={limit:g} are over")

    def stop(self, why: str) -> None:
        """Makes all cells save and end; a second call kills them."""
        again, self.stopping = self.stopping, True
        doing = "ending what runs" if again else "cells finish and save their step; press Ctrl-C again to end them"
        self.display.note(f"{why}: {doing}")
        for name in list(self.running):
            self._end(name, signal.SIGKILL if again else signal.SIGTERM)

    def _end(self, name: str, number: signal.Signals) -> None:
        self.requested.add(name)
        with contextlib.suppress(ProcessLookupError):
            self.running[name][1].send_signal(number)

    async def _run(self, cell: Cell) -> None:
        last, began, output = states.read_record(cell), time.monotonic(), states.output_path(cell)
        printed = output.stat().st_size if output.is_file() else 0  # bytes printed by earlier starts
        resume = ["--resume"] if cell.folder.is_dir() else []
        used = states.cell_seconds(cell, last) if last else 0.0  # read before the process creates the folder
        states.write_config(cell)
        given = ["--config", str(states.config_path(cell)), "log.progress=plain"]
        child = await self.start(["train", *given, *resume], output)
        self.running[cell.name] = cell, child
        if self.stopping:  # `stop` was called while the process started
            self._end(cell.name, signal.SIGTERM)
        record = CellRecord(
            pid=child.pid, began=states.process_birth(child.pid), starts=(last.starts if last else 0) + 1, seconds=used
        )
        states.write_record(cell, record)
        self.display.note(f"{cell.name}: {'resumes' if resume else 'starts'}")
        try:
            status = await self._wait(cell, child, record)
        except asyncio.CancelledError:
            self._end(cell.name, signal.SIGKILL)
            raise
        finally:
            del self.running[cell.name]
        reason = self.late.get(cell.name, "") if status == 0 else _reason(status, output, printed)
        seconds, step = time.monotonic() - began, states.last_step(cell)
        states.write_record(cell, record.ended(status=status, reason=reason, seconds=seconds, step=step))
        (found,) = states.find_states(self.study, [cell])
        self.display.ended(found)

    async def _wait(self, cell: Cell, child: Child, record: CellRecord) -> int:
        """Returns the exit status; 0 also if the cell was stopped. At the end of its time the cell gets SIGTERM. After
        its ``learner.timeout_seconds``, which no call of a healthy run takes, it is killed."""
        limit = self.study.budget.cell_minutes
        left = None if limit is None else max(60 * limit - record.seconds, 0.0)
        waits = asyncio.ensure_future(child.wait())
        done, _ = await asyncio.wait({waits}, timeout=left)
        if not done:
            self._end(cell.name, signal.SIGTERM)
            most = cell.config.learner.timeout_seconds
            done, _ = await asyncio.wait({waits}, timeout=most)
            if not done:
                self.late[cell.name] = f"it did not stop within learner.timeout_seconds={most:g} and was ended"
                self.display.note(f"{cell.name}: {self.late[cell.name]} (pid {child.pid})")
                self._end(cell.name, signal.SIGKILL)
        status = await waits
        return 0 if cell.name in self.requested and status in _ASKED else status


class _Display:
    """Progress bars in a terminal; otherwise a line for every event and one a minute."""

    def __init__(self, study: Study, cells: Sequence[Cell], console: Console, steps: dict[str, int]) -> None:
        self._study, self._cells, self._steps = study, cells, steps
        self._console, self._told = console, time.monotonic()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        )
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._whole = self._bars.add_task("steps of all cells", total=sum(c.config.train.steps for c in cells))
        self._tasks = {cell.name: self._bars.add_task(cell.name, total=0, visible=False) for cell in cells}

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def look(self, running: Sequence[Cell], num_waiting: int) -> None:
        """Shows the progress of each running cell."""
        for cell in running:
            self._steps[cell.name] = step = states.last_step(cell)
            self._bars.update(self._tasks[cell.name], completed=step, total=cell.config.train.steps, visible=True)
        self._bars.update(self._whole, completed=sum(self._steps.values()))
        if not self._console.is_terminal and time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            each_one = ", ".join(f"{c.name} step {self._steps[c.name]}/{c.config.train.steps}" for c in running)
            self.note(f"running: {each_one or 'none'}; {num_waiting} wait")

    def ended(self, found: CellStanding) -> None:
        """Prints a line about a cell after the end of its process."""
        self._steps[found.cell.name] = found.step
        self._bars.update(self._tasks[found.cell.name], visible=False)
        value = "" if found.value is None else f", {self._study.evaluation.metric} {found.value:.4g}"
        why = f": {found.reason}" if found.reason else ""
        steps = f"step {found.step}/{found.cell.config.train.steps}"
        self.note(f"{found.cell.name}: {found.state} at {steps}{value}{why}")


@contextlib.contextmanager
def lock_study(study: Study) -> Iterator[None]:
    """Context in which only this process starts cells of the study. Raises ConfigError if another does."""
    assert study.folder is not None
    study.folder.mkdir(parents=True, exist_ok=True)
    with (study.folder / ".lock").open("ab") as file:
        if not lock(file):
            raise ConfigError(f"{study.folder}: another process runs this study; wait for its end, or end it")
        yield


@contextlib.contextmanager
def _signals(series: _Series) -> Iterator[None]:
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, series.stop, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _reason(status: int, output: Path, before: int) -> str:
    """Returns a process's last error or last line, or the signal that ended it; earlier starts printed ``before``
    bytes.
    """
    with output.open("rb") as file:
        file.seek(max(output.stat().st_size - _TAIL_BYTES, before))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    if status < 0:
        return f"ended by {signal.Signals(-status).name}; {output} has what it printed"
    at = max((i for i, line in enumerate(lines) if line.startswith("error:")), default=len(lines) - 1)
    said = " / ".join(line.strip() for line in lines[at:])[:_MOST_REASON] if lines else "it printed nothing"
    return f"status {status}: {said}"
