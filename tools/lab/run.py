"""Runs the cells of a study: real training processes side by side on this machine, or tasks of Slurm.

Slurm gets an array for those cells that ask for alike nodes, a task for each. Runs on a login node too: imports neither
torch nor megatron.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from launcher.commands import submit
from launcher.commands.status import states_of
from launcher.hosts.slurm.calls import call_slurm
from launcher.hosts.slurm.script import code_folder, job_script, show_code
from launcher.preflight.checks import preflight
from launcher.processes.environment import die_with_parent, threads_per_worker
from launcher.runs.folder import lock
from rl_megatron.config.io import save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.slurm import minutes_of
from rl_megatron.errors import ConfigError, together
from rl_megatron.files import write_atomically
from tools.lab import states
from tools.lab.states import CellRecord, CellStanding, CellState, Queued
from tools.lab.study import Cell, Study

_LOOK_SECONDS = 1.0  # between two looks at what runs
_LINE_SECONDS = 60.0  # between two lines where there is no terminal
_MOST_REASON = 400  # characters
_ASKED = {0, 130, -signal.SIGTERM, -signal.SIGKILL}  # how a cell ends that was asked to stop, or was ended
_TAIL_BYTES = 1 << 14


class Child(Protocol):
    """A process that trains one cell."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        ...

    async def wait(self) -> int:
        """Wait for its end. Returns its exit status; below 0, a signal's number."""
        ...


Start = Callable[[Sequence[str], Path], Awaitable[Child]]
"""Starts ``rl-megatron`` with arguments, as leader of a session; what it prints is added to a file."""


async def start_process(arguments: Sequence[str], output: Path) -> Child:
    """A new interpreter, which the kernel ends with this one: a study that was killed leaves no cell behind."""
    with output.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "launcher", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C is for the study alone, which passes it on
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
    queue: Callable[[], Mapping[str, Queued]] | None = None,
) -> list[CellStanding]:
    """Start the cells that have not ended, and wait until none runs. Returns what has become of each.

    Ctrl-C or SIGTERM has every cell finish its step and save; a second one ends them at once. A cell that has failed is
    started only with ``retry``, one that is in Slurm's queue not at all; ``queue`` asks it, while no other process can
    send cells, before the first start and after the last end. Raises ConfigError if another process runs this study,
    and OSError if a cell cannot be started or its record not be written, as on a full disk; the other cells are then
    ended.
    """
    at_once = cells_at_once(study, cells)
    with alone(study):
        found = states.find_states(study, cells, queue() if queue else None)
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
                async with together() as group:
                    for _ in range(min(at_once, len(waiting))):
                        group.create_task(series.work())
            finally:
                watch.cancel()
        return states.find_states(study, cells, queue() if queue else None)


def cells_at_once(study: Study, cells: Sequence[Cell]) -> int:
    """As the budget says, or as many as this machine's cores allow; Ray's own processes count as one core of a cell.

    Raises ConfigError for several on the same GPUs, or on the same nodes of the job that this process is in.
    """
    asked = study.budget.cells_at_once
    if "SLURM_JOB_ID" in os.environ and any(cell.config.run.launcher != "local" for cell in cells):
        if asked is not None and asked > 1:
            raise ConfigError(
                f"budget.cells_at_once={asked}: this is inside job {os.environ['SLURM_JOB_ID']}, and each cell would "
                "place its ranks on all of the job's nodes; allowed: 1. For more at once use rl-megatron experiment "
                "submit, which gives each cell a job"
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
    """The cells that wait and those that run. ``stopping``: no further one starts."""

    study: Study
    waiting: deque[Cell]
    start: Start
    display: _Display
    running: dict[str, tuple[Cell, Child]] = field(default_factory=dict)
    stopping: bool = False
    began: float = field(default_factory=time.monotonic)
    asked: set[str] = field(default_factory=set)  # the cells that were asked to stop
    late: dict[str, str] = field(default_factory=dict)  # those that had to be ended, with the reason

    async def work(self) -> None:
        """Run one cell after the other until none waits."""
        while self.waiting and not self.stopping:
            await self._run(self.waiting.popleft())

    async def watch(self) -> None:
        """Show how far the cells are, and stop all of them when the study's time is over."""
        limit = self.study.budget.minutes
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.display.look([cell for cell, _ in self.running.values()], len(self.waiting))
            if limit is not None and not self.stopping and time.monotonic() - self.began >= 60 * limit:
                self.stop(f"budget.minutes={limit:g} are over")

    def stop(self, why: str) -> None:
        """Have all cells save and end; when this was asked before, end them at once."""
        again, self.stopping = self.stopping, True
        doing = "ending what runs" if again else "cells finish and save their step; press Ctrl-C again to end them"
        self.display.note(f"{why}: {doing}")
        for name in list(self.running):
            self._end(name, signal.SIGKILL if again else signal.SIGTERM)

    def _end(self, name: str, number: signal.Signals) -> None:
        self.asked.add(name)
        with contextlib.suppress(ProcessLookupError):
            self.running[name][1].send_signal(number)

    async def _run(self, cell: Cell) -> None:
        last, began, output = states.read_record(cell), time.monotonic(), states.output_path(cell)
        output.parent.mkdir(parents=True, exist_ok=True)
        printed = output.stat().st_size if output.is_file() else 0  # by earlier starts
        resume = ["--resume"] if cell.folder.is_dir() else []
        used = states.seconds_of(cell, last) if last else 0.0  # asked before the process makes the folder
        save_resolved(cell.config, states.config_path(cell))
        given = ["--config", str(states.config_path(cell)), "log.progress=plain"]
        child = await self.start(["train", *given, *resume], output)
        self.running[cell.name] = cell, child
        if self.stopping:  # since the process was asked for
            self._end(cell.name, signal.SIGTERM)
        record = CellRecord(
            pid=child.pid,
            began=states.birth_of(child.pid),
            starts=(last.starts if last else 0) + 1,
            seconds=used,
        )
        states.write_record(cell, record)
        self.display.note(f"{cell.name}: {'goes on' if resume else 'starts'}")
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
        """Its exit status; 0 also where it was asked to stop. At the end of its time it is asked to, and ended if it
        has not after its ``learner.timeout_seconds``, which no call of a healthy run takes."""
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
        return 0 if cell.name in self.asked and status in _ASKED else status


class _Display:
    """Bars in a terminal, else a line for every event and one a minute."""

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
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def look(self, running: Sequence[Cell], num_waiting: int) -> None:
        """Show how far each running cell is."""
        for cell in running:
            self._steps[cell.name] = step = states.last_step(cell)
            self._bars.update(self._tasks[cell.name], completed=step, total=cell.config.train.steps, visible=True)
        self._bars.update(self._whole, completed=sum(self._steps.values()))
        if not self._console.is_terminal and time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            each_one = ", ".join(f"{c.name} step {self._steps[c.name]}/{c.config.train.steps}" for c in running)
            self.note(f"running: {each_one or 'none'}; {num_waiting} wait")

    def ended(self, found: CellStanding) -> None:
        """A line about a cell whose process has ended."""
        self._steps[found.cell.name] = found.step
        self._bars.update(self._tasks[found.cell.name], visible=False)
        value = "" if found.value is None else f", {self._study.evaluation.metric} {found.value:.4g}"
        why = f": {found.reason}" if found.reason else ""
        steps = f"step {found.step}/{found.cell.config.train.steps}"
        self.note(f"{found.cell.name}: {found.state} at {steps}{value}{why}")


@contextlib.contextmanager
def alone(study: Study) -> Iterator[None]:
    """Let one process start cells of the study. Raises ConfigError if another does."""
    assert study.folder is not None
    study.folder.mkdir(parents=True, exist_ok=True)
    with (study.folder / ".lock").open("ab") as file:
        if not lock(file):
            raise ConfigError(
                f"{study.folder}: another process runs this study, or sends it; wait for its end, or end it"
            )
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
    """The error that it printed last, or its last line, or the signal that ended it; earlier starts printed ``before``
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellArray:
    """Cells of one shape. Task i of the script trains cell i."""

    cells: Sequence[Cell]
    script: str
    resources: str  # ranks on nodes, to show
    private: bool  # whether the script holds values of slurm.environment

    def describe(self) -> str:
        """Lines to show."""
        (line,) = (line for line in self.script.splitlines() if line.startswith("#SBATCH --array="))
        return f"{len(self.cells)} cells, {line.removeprefix('#SBATCH ')}, each:\n{self.resources}"


def queue_of(cells: Sequence[Cell]) -> dict[str, Queued]:
    """What Slurm says of the cells that were sent to it and have not said that they ended.

    Asks nothing if there are none. Raises ConfigError if Slurm does not answer here.
    """
    tasks = states.unsettled(cells)
    told = states_of(tasks, cells[0].folder.parent.name) if tasks else {}  # the arrays' job name (`_script`)
    return {task: Queued(word=found.name, text=found.text.strip()) for task, found in told.items()}


def checked_for_slurm(cells: Sequence[Cell]) -> list[str]:
    """Check every arm as `submit` does. Returns each one's notes. Raises one ConfigError for all problems."""
    arms = dict[str, Cell]()
    for cell in cells:
        arms.setdefault(cell.arm, cell)  # a seed changes nothing here
    problems, notes = list[str](), list[str]()
    for arm, cell in arms.items():
        try:
            _check_array(cell.config)
            config = submit.for_slurm(cell.config)
            found = preflight(config, for_job=True)
            problems += [f"{arm}: {text}" for text in found.texts("problem")]
            notes += [f"{arm}: {text}" for text in found.notes()]
            submit.checked(config)
        except ConfigError as error:
            problems += [f"{arm}: {line}" for line in str(error).splitlines()]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return notes


def arrays_of(study: Study, cells: Sequence[Cell], *, queued: int = 0) -> list[CellArray]:
    """The arrays for these cells, beside so many of the study that are in the queue.

    Raises ConfigError if there are more of them than cells may run at once.
    """
    assert study.folder is not None
    limited = study.budget.cell_minutes is not None
    by_shape: dict[str, list[Cell]] = {}
    for cell in cells:  # of cells with limited minutes each has its own, which `send` gives it
        by_shape.setdefault(_script(study, cell, [""], "0", 0 if limited else None), []).append(cell)
    at_once = _shares(study, [len(alike) for alike in by_shape.values()], queued)
    most = [max(_minutes(study, cell) for cell in alike) if limited else None for alike in by_shape.values()]
    return [
        CellArray(
            cells=alike,
            script=_script(study, alike[0], [cell.name for cell in alike], f"0-{len(alike) - 1}{throttle}", minutes),
            resources=submit.checked(submit.for_slurm(alike[0].config)).describe(),
            private=bool(alike[0].config.slurm.environment),
        )
        for alike, throttle, minutes in zip(by_shape.values(), at_once, most, strict=True)
    ]


def send(study: Study, arrays: Sequence[CellArray]) -> list[tuple[str, Path]]:
    """Submit the arrays, after Slurm has said of each that it could run. Returns their ids and scripts.

    A cell's record then names its task, as its folder does for ``rl-megatron status``. An array is held until both are
    written, so that none runs of which a later call does not know. Raises ConfigError with sbatch's words, and OSError
    if a record cannot be written; that array is cancelled, arrays before it stay sent.
    """
    assert study.folder is not None
    folder = study.folder / "jobs"
    for needed in (folder, study.folder / "cells"):
        needed.mkdir(parents=True, exist_ok=True)
    show_code(study.folder)
    paths = [folder / f"next-{number}.sbatch" for number, _ in enumerate(arrays)]
    sent = []
    try:
        for array, path in zip(arrays, paths, strict=True):
            write_atomically(path, array.script.encode(), private=array.private)
            call_slurm(["sbatch", "--test-only"], path)
        for array, path in zip(arrays, paths, strict=True):
            for cell in array.cells:
                save_resolved(submit.for_slurm(cell.config), states.config_path(cell))
            job = call_slurm(["sbatch", "--parsable", "--hold"], path).strip().partition(";")[0]
            try:
                _write_tasks(study, array, job)
                sent.append((job, path.rename(folder / f"{job}.sbatch")))
                call_slurm(["scontrol", "release", job])
            except BaseException as error:
                _take_back(job, error)
                raise
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    return sent


def _write_tasks(study: Study, array: CellArray, job: str) -> None:
    """Name each cell's task in its record and its folder, and give those with less time left than others their own."""
    shorter: dict[int, list[str]] = {}
    if study.budget.cell_minutes is not None:
        for index, cell in enumerate(array.cells):
            shorter.setdefault(_minutes(study, cell), []).append(str(index))
        shorter.pop(max(shorter))
    for index, cell in enumerate(array.cells):
        states.write_record(cell, _sent(study, cell, f"{job}_{index}"))
        (cell.folder / "jobs").mkdir(parents=True, exist_ok=True)
        write_atomically(cell.folder / "jobs" / "id", f"{job}_{index}\n".encode())
    for minutes, tasks in shorter.items():
        call_slurm(["scontrol", "update", f"JobId={job}_[{','.join(tasks)}]", f"TimeLimit={minutes}"])


def _take_back(job: str, why: BaseException) -> None:
    try:
        call_slurm(["scancel", job])
    except ConfigError as error:
        raise ConfigError(f"{why}\narray {job} is still held in the queue; scancel {job} ends it: {error}") from why


def _check_array(config: RunConfig) -> None:
    """Raises ConfigError for what an array of cells cannot have."""
    if config.slurm.array:
        raise ConfigError(
            f"slurm.array={config.slurm.array}: a study's cells are the tasks of its arrays; remove it, and name seeds "
            "in the study's `seeds`"
        )
    if config.slurm.heterogeneous:
        raise ConfigError(
            "slurm.heterogeneous=true: Slurm has no arrays of heterogeneous jobs; give all roles nodes of one kind, or "
            "send the cells one by one with rl-megatron submit"
        )


def _script(study: Study, cell: Cell, names: Sequence[str], array: str, minutes: int | None) -> str:
    """The script for cells like this one; its run is the study's folder. With ``minutes`` it does not come back."""
    assert study.folder is not None
    config = submit.for_slurm(cell.config)
    time = {} if minutes is None else {"time": str(minutes), "requeues": 0}
    slurm = config.slurm.model_copy(update={"array": array, **time})
    run = config.run.model_copy(update={"dir": study.folder.parent, "name": study.folder.name})
    config = config.model_copy(update={"slurm": slurm, "run": run})
    folder, budgeted = Path.cwd(), minutes is not None
    package = code_folder(folder / study.folder)
    return job_script(config, folder=folder, python=sys.executable, package=package, cells=names, budgeted=budgeted)


def _minutes(study: Study, cell: Cell) -> int:
    """With ``budget.cell_minutes``, those of the cell's job, which saves at their end.

    Raises ConfigError if slurm.time is shorter: then the cell's time would be spread over several jobs.
    """
    granted, slurm = _granted(study, cell), cell.config.slurm
    assert granted is not None
    minutes = -int(-granted // 60) + -(-slurm.signal_seconds // 60)
    if minutes > minutes_of(slurm.time):
        raise ConfigError(
            f"{cell.arm}: budget.cell_minutes={study.budget.cell_minutes:g} and slurm.signal_seconds="
            f"{slurm.signal_seconds} to save need a job of {minutes} minutes, but slurm.time={slurm.time}; raise "
            "slurm.time as far as the partition allows, or lower or remove the budget"
        )
    return minutes


def _granted(study: Study, cell: Cell) -> float | None:
    """The seconds that ``budget.cell_minutes`` leaves the cell; None: as many as it needs."""
    limit = study.budget.cell_minutes
    return None if limit is None else max(60 * limit - _used(cell), 60.0)


def _used(cell: Cell) -> float:
    """The seconds of all its starts."""
    record = states.read_record(cell)
    return states.seconds_of(cell, record) if record else 0.0


def _sent(study: Study, cell: Cell, task: str) -> CellRecord:
    before = states.read_record(cell)
    record = CellRecord(pid=0, began="", starts=(before.starts if before else 0) + 1, seconds=_used(cell))
    return replace(record, task=task, granted=_granted(study, cell))


def _shares(study: Study, sizes: Sequence[int], queued: int) -> list[str]:
    """The throttle of each array, as %8: its share of the cells that may run beside those that are in the queue, by its
    cells, at least one.
    """
    at_once = study.budget.cells_at_once
    if at_once is None:
        return [""] * len(sizes)
    if at_once < len(sizes):
        raise ConfigError(
            f"budget.cells_at_once={at_once}, but the cells have {len(sizes)} shapes (nodes, time and other keys of "
            f"slurm), each an array of its own; raise it to {len(sizes)} or more, or give them alike nodes"
        )
    shares = [1] * len(sizes)
    free = max(at_once - queued, len(sizes))
    for _ in range(min(free, sum(sizes)) - len(sizes)):  # each to the array with the most cells for its share
        shares[max(range(len(sizes)), key=lambda i: sizes[i] / shares[i])] += 1
    return [f"%{share}" for share in shares]
