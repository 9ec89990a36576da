"""What has become of a study's cells: read from their run folders, and from the record that `experiment run` keeps."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

import psutil

from rl_megatron.durable import write_atomically
from rl_megatron.errors import DataError
from rl_megatron.experiments.cells import Cell
from rl_megatron.experiments.study import Study
from rl_megatron.observability.files import JsonRow, from_the_end
from rl_megatron.observability.history import number


class CellState(StrEnum):
    """Done: its last step is recorded. Spent: its time is, so it counts as it is. Stopped: a start goes on with it."""

    DONE = "done"
    SPENT = "spent"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """What `experiment run` knows of a cell: the process of its last start, and how that ended.

    ``status`` is its exit status, below 0 a signal's number; None while it runs. ``seconds`` are those of all starts.
    ``step`` is the last one recorded when it ended: a failed run that has a later one was resumed by hand.
    """

    pid: int
    began: float  # when the system says that the process started: a number alone is given out again
    starts: int
    seconds: float
    status: int | None = None
    reason: str = ""
    step: int | None = None

    def ended(self, *, status: int, reason: str, seconds: float, step: int) -> CellRecord:
        """The record of a process that has ended after so many seconds, at this step."""
        return replace(self, status=status, reason=reason, seconds=self.seconds + seconds, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStanding:
    """A cell and what has become of it. ``value`` is the last of the study's metric."""

    cell: Cell
    state: CellState
    recorded: bool  # whether there is a row of RL
    step: int
    value: float | None
    seconds: float
    reason: str

    def line(self) -> str:
        """Columns of a table, a line."""
        value = "-" if self.value is None else f"{self.value:.4g}"
        steps = f"{self.step}/{self.cell.config.train.steps}"
        text = f"{self.state:<8} {steps:>9} {value:>9} {self.seconds / 60:>7.1f}  {self.cell.name}"
        return f"{text}\n         {self.reason}" if self.reason else text


def record_path(cell: Cell) -> Path:
    """The file of its record, beside its folder, where it also is if the run fails before it makes that."""
    return cell.folder.parent / "cells" / f"{cell.name}.json"


def config_path(cell: Cell) -> Path:
    """The configuration that its processes are started with: what was checked, whatever has become of its base."""
    return cell.folder.parent / "cells" / f"{cell.name}.yaml"


def output_path(cell: Cell) -> Path:
    """What its processes have printed."""
    return cell.folder.parent / "cells" / f"{cell.name}.txt"


def read_record(cell: Cell) -> CellRecord | None:
    """Its record, if it was ever started by a study. Raises DataError for a file that is none."""
    path = record_path(cell)
    try:
        return CellRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not the record of a cell ({error}); remove it to start the cell again") from error


def write_record(cell: Cell, record: CellRecord) -> None:
    """Atomically. Raises OSError."""
    path = record_path(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(record)).encode())


def find_states(study: Study, cells: Sequence[Cell]) -> list[CellStanding]:
    """What has become of each cell, in their order. A cell with a broken metrics.jsonl has failed, by that reason."""
    return [_found(study, cell) for cell in cells]


def last_step(cell: Cell) -> int:
    """The last step of RL that is recorded, from the file's end, however long that is; 0 if there is none."""
    path = cell.folder / "metrics.jsonl"
    try:
        row = next(from_the_end(path), None)
    except (FileNotFoundError, DataError):  # `find_states` says what is wrong
        return 0
    return _step(row) if row is not None and row.get("phase") == "rl" else 0


def states_table(found: Sequence[CellStanding]) -> str:
    """For the terminal: a line a cell, with the reason under one that failed, and the counts."""
    head = f"{'state':<8} {'step':>9} {'value':>9} {'minutes':>7}  run"
    return "\n".join([head, *(each.line() for each in found), counts(found)])


def counts(found: Sequence[CellStanding]) -> str:
    """How many cells are in each state, in words."""
    number_of = Counter(each.state for each in found)
    return f"{len(found)} cells: " + ", ".join(f"{number_of[state]} {state}" for state in CellState if number_of[state])


def is_running(record: CellRecord) -> bool:
    """Whether the process of its last start is alive on this machine."""
    if record.status is not None:
        return False
    try:
        process = psutil.Process(record.pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - record.began) < 1.0
    except psutil.NoSuchProcess:
        return False


def _found(study: Study, cell: Cell) -> CellStanding:
    record, recorded, value, broken = read_record(cell), False, None, ""
    try:
        for row in _rows(cell):
            recorded, value = True, number(row, study.evaluation.metric)
            if value is not None:
                break
    except DataError as error:
        broken = str(error)
    step = last_step(cell)
    state, reason = _state(study, cell, record, step, any_row=recorded)
    if broken and state is not CellState.RUNNING:
        state, reason = CellState.FAILED, broken
    return CellStanding(
        cell=cell,
        state=state,
        recorded=recorded and not broken,
        step=step,
        value=value,
        seconds=record.seconds if record else 0.0,
        reason=reason,
    )


def _rows(cell: Cell) -> Iterator[JsonRow]:
    """The rows of RL, the last one first; before them there are those of a warm start."""
    path = cell.folder / "metrics.jsonl"
    if path.is_file():
        yield from itertools.takewhile(lambda row: row.get("phase") == "rl", from_the_end(path))


def _step(row: JsonRow) -> int:
    return int(number(row, "step") or 0)


def _state(study: Study, cell: Cell, record: CellRecord | None, step: int, *, any_row: bool) -> tuple[CellState, str]:
    if record is not None and is_running(record):
        return CellState.RUNNING, ""
    if record is not None and record.status and (record.step is None or step <= record.step):
        return CellState.FAILED, record.reason
    if any_row and step >= cell.config.train.steps:
        return CellState.DONE, ""
    limit = study.budget.cell_minutes
    if record is not None and limit is not None and record.seconds >= 60 * limit:
        return CellState.SPENT, f"budget.cell_minutes={limit:g} are over"
    return (CellState.STOPPED if cell.folder.is_dir() else CellState.WAITING), ""
