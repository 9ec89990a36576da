"""The states of a study's cells, read from their run folders and their records."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from rl_megatron.agents.threads import start_ticks
from rl_megatron.config import yaml_text
from rl_megatron.config.io import save_resolved
from rl_megatron.errors import DataError, quote_start
from rl_megatron.files import parse, write_atomically
from rl_megatron.observability.files import STEPS, JsonRow, from_the_end, number
from rl_megatron.observability.metrics import with_current_names
from tools.lab.study import Cell, Study, numeric_values


class CellState(StrEnum):
    """Done: the last step is recorded. Spent: the time is over, so it counts as it is. Stopped: a start resumes it."""

    DONE = "done"
    SPENT = "spent"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"
    WAITING = "waiting"


STARTABLE = (CellState.STOPPED, CellState.WAITING)
"""The states of cells that the next start of the study runs without ``retry``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """A study's record of a cell: the process of its last start, and its end.

    ``status`` is the exit status, below 0 a signal's number; None while it runs. ``seconds`` are those of all starts
    since its folder was created. ``step`` is the last one recorded at its end: a failed run that has a later one was
    resumed by hand.
    """

    pid: int
    began: str  # `process_birth` the process: the system reuses process ids
    starts: int
    seconds: float
    status: int | None = None
    reason: str = ""
    step: int | None = None

    def ended(self, *, status: int, reason: str, seconds: float, step: int) -> CellRecord:
        """Returns the record of a process that has ended after ``seconds`` at ``step``."""
        return replace(self, status=status, reason=reason, seconds=self.seconds + seconds, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStanding:
    """A cell and its state. ``value`` is the last one of the study's metric, None if that is not finite."""

    cell: Cell
    state: CellState
    recorded: bool  # True if there is a row of RL
    step: int
    value: float | None
    seconds: float
    reason: str

    def line(self) -> str:
        """Returns the cell's line of a table."""
        value = "-" if self.value is None else f"{self.value:.4g}"
        steps = f"{self.step}/{self.cell.config.train.steps}"
        minutes = f"{self.seconds / 60:.1f}" if self.seconds else "-"  # known once a start has ended
        text = f"{self.state:<8} {steps:>9} {value:>9} {minutes:>7}  {self.cell.name}"
        return f"{text}\n         {self.reason}" if self.reason else text


def record_path(cell: Cell) -> Path:
    """Returns the file of the cell's record, outside its folder because a run may fail before it creates that."""
    return cell.folder.parent / "cells" / f"{cell.name}.json"


def config_path(cell: Cell) -> Path:
    """Returns the file of the checked configuration that the cell's processes get, even if its base has changed."""
    return cell.folder.parent / "cells" / f"{cell.name}.yaml"


def write_config(cell: Cell) -> None:
    """Writes that file. Raises OSError."""
    path = config_path(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_resolved(cell.config, path)


def output_path(cell: Cell) -> Path:
    """Returns the file with the output of the cell's processes."""
    return cell.folder.parent / "cells" / f"{cell.name}.txt"


def read_record(cell: Cell) -> CellRecord | None:
    """Reads the record of a cell; None if no study has started it. Raises DataError if the file is not a record."""
    path = record_path(cell)
    try:
        values = parse(path.read_bytes())
        values.pop("granted", None)
        return None if values.pop("task", "") else CellRecord(**values)  # 0.3.0 could send a cell to Slurm as a task
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not the record of a cell ({error}); remove it to start the cell again") from error


def write_record(cell: Cell, record: CellRecord) -> None:
    """Writes the record of a cell atomically. Raises OSError."""
    path = record_path(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(record)).encode())


def find_states(study: Study, cells: Sequence[Cell]) -> list[CellStanding]:
    """Returns the state of each cell, in their order. A cell with a broken metrics.jsonl has failed for that reason."""
    return [_found(study, cell) for cell in cells]


def last_step(cell: Cell) -> int:
    """Returns the last recorded step of RL, read from the file's end; 0 if there is none."""
    path = cell.folder / "metrics.jsonl"
    try:
        row = next((row for row in from_the_end(path) if row.get("phase") != "eval"), None)
    except (FileNotFoundError, DataError):  # `find_states` reports the problem
        return 0
    return int(number(row, "step") or 0) if row is not None and row.get("phase") in STEPS else 0


def cell_seconds(cell: Cell, record: CellRecord) -> float:
    """Returns seconds of all starts of the cell; 0 if its folder was removed, so that it begins again."""
    return record.seconds if cell.folder.is_dir() else 0.0


def describe_drift(cell: Cell) -> str:
    """Describes values that differ from those that the cell ran with, for example by another version's defaults. It
    is empty if none differ. The folder's name does not show them: it shows values that differ from the defaults."""
    path = cell.folder / "config.yaml"
    if not path.is_file():
        return ""
    then, now = dict(numeric_values(yaml_text.read(path))), dict(numeric_values(cell.config.model_dump(mode="json")))
    changed = [f"{key}={quote_start(then[key])}" for key in then.keys() & now.keys() if then[key] != now[key]]
    wanted = [f"{key}={quote_start(now[key])}" for key in then.keys() & now.keys() if then[key] != now[key]]
    if not changed:
        return ""
    return (
        f"it ran with {', '.join(sorted(changed))}; now it would with {', '.join(sorted(wanted))}: remove it to repeat"
    )


def states_table(study: Study, found: Sequence[CellStanding]) -> str:
    """Returns a table for the terminal: a line for each cell, with the reason below a failed one, and the counts."""
    head = f"{'state':<8} {'step':>9} {'value':>9} {'minutes':>7}  run (value: {study.evaluation.metric})"
    return "\n".join([head, *(each.line() for each in found), counts(found)])


def counts(found: Sequence[CellStanding]) -> str:
    """Counts the cells in each state, in words."""
    number_of = Counter(each.state for each in found)
    return f"{len(found)} cells: " + ", ".join(f"{number_of[state]} {state}" for state in CellState if number_of[state])


def is_running(record: CellRecord) -> bool:
    """True if the process of the cell's last start is alive on this machine."""
    if record.status is not None:
        return False
    birth = process_birth(record.pid)
    return bool(birth) and birth == record.began


def process_birth(pid: int) -> str:
    """Returns the machine's boot id and the ticks from boot to the start of a running process, which do not depend on
    the clock; empty if it has ended."""
    ticks = start_ticks(pid)
    return "" if ticks is None else f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {ticks}"


def _found(study: Study, cell: Cell) -> CellStanding:
    record, recorded, value, broken = read_record(cell), False, None, ""
    try:
        for row in _rows(cell):
            recorded = True
            if study.evaluation.metric in row:
                value = number(row, study.evaluation.metric)
                break
    except DataError as error:
        broken = str(error)
    step = last_step(cell)
    ended = recorded and step >= cell.config.train.steps
    state, reason = _state(study, cell, record, step, ended=ended)
    if broken and state is not CellState.RUNNING:
        state, reason = CellState.FAILED, broken
    return CellStanding(
        cell=cell,
        state=state,
        recorded=recorded and not broken,
        step=step,
        value=value,
        seconds=cell_seconds(cell, record) if record else 0.0,
        reason=reason,
    )


def _rows(cell: Cell) -> Iterator[JsonRow]:
    """Yields the rows of RL and of its evaluations, the last one first, without the earlier ones of a warm start."""
    path = cell.folder / "metrics.jsonl"
    if path.is_file():
        rows = map(with_current_names, from_the_end(path))
        yield from itertools.takewhile(lambda row: row.get("phase") != "warm_start", rows)


def _state(study: Study, cell: Cell, record: CellRecord | None, step: int, *, ended: bool) -> tuple[CellState, str]:
    if record is not None and is_running(record):
        return CellState.RUNNING, ""
    if record is not None and record.status and (record.step is None or step <= record.step):
        return CellState.FAILED, record.reason
    if ended:
        return CellState.DONE, ""
    limit = study.budget.cell_minutes
    if record is not None and limit is not None and cell_seconds(cell, record) >= 60 * limit:
        late = f"; {record.reason}" if record.reason else ""
        return CellState.SPENT, f"budget.cell_minutes={limit:g} are over{late}"
    return (CellState.STOPPED if cell.folder.is_dir() else CellState.WAITING), ""
