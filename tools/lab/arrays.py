"""Sends the cells of a study to Slurm: an array for those that ask for alike nodes, a task for each cell.

Runs on a login node: imports neither torch nor megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.commands import submit
from launcher.commands.status import states_of
from launcher.hosts.slurm.calls import call_slurm
from launcher.hosts.slurm.script import code_folder, job_script, show_code
from launcher.preflight.checks import preflight
from rl_megatron.config.io import save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.slurm import minutes_of
from rl_megatron.errors import ConfigError
from rl_megatron.files import write_atomically
from tools.lab import states
from tools.lab.states import CellRecord, Queued
from tools.lab.study import Cell, Study


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
