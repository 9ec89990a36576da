"""What has become of a study's cells: read from their run folders, their records, and what Slurm says of its tasks.

The tasks' scripts (slurm/job.sh) leave a word of their own about cells that were sent to Slurm.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from rl_megatron.agents.threads import began
from rl_megatron.config import yaml_text
from rl_megatron.errors import DataError, shorten
from rl_megatron.files import parse, write_atomically
from rl_megatron.observability.files import STEPS, JsonRow, from_the_end, number
from tools.lab.study import Cell, Study, numbers_of

_SAID = re.compile(r"^\[([-+0-9T:]+)\] job \S+, restart (\d+): (.*)$", re.MULTILINE)
_ENDS = ("done", "saved, but ", "failed with status ", "failed: twice in a row ")
_WHILE_IT_RUNS = "the time limit or preemption is near"
_WAITS = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
_RUNS = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_FAILED = {"FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Slurm's word on a task, as PENDING, and a line with its reason or its node."""

    word: str
    text: str

    @property
    def waits(self) -> bool:
        """Whether it will start, or start again."""
        return self.word in _WAITS

    @property
    def runs(self) -> bool:
        """Whether it has nodes."""
        return self.word in _RUNS

    @property
    def failed(self) -> bool:
        """Whether it has ended by a fault of its own: not by a node's, nor because somebody cancelled it."""
        return self.word in _FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the script of a cell's array task has said. ``end`` is ``done``, the line of its failure or of requeues
    that are used up, or empty."""

    log: Path
    end: str
    seconds: float
    time_was_up: bool  # in its last attempt, so that the run was saved

    @property
    def failed(self) -> bool:
        """Whether it has ended by an error."""
        return self.end.startswith("failed")


def task_log(cell: Cell, task: str) -> Path:
    """What the task of this name, as 12_3, has printed: its script's own lines, and Slurm's."""
    return cell.folder.parent / "jobs" / f"{task}.txt"


def read_task(cell: Cell, task: str) -> Task:
    """Read its lines and its attempts' folders; a task that has not started has said nothing."""
    log, jobs = task_log(cell, task), cell.folder / "jobs"
    text = log.read_text(errors="replace") if log.is_file() else ""
    end, attempt = "", jobs
    began, ended = dict[Path, float](), dict[Path, float]()
    for when, restart, said in _SAID.findall(text):
        attempt, end = jobs / f"{task}-{restart}", said if said.startswith(_ENDS) else ""
        at = datetime.fromisoformat(when).timestamp()  # older scripts wrote no zone: this one's
        if said.startswith("starts on"):
            began[attempt] = at
        elif not said.startswith(_WHILE_IT_RUNS):
            ended[attempt] = at
    for each in began.keys() - ended.keys():  # it runs, or Slurm ended it
        if (printed := each / "controller.txt").is_file():
            ended[each] = printed.stat().st_mtime
    seconds = sum(max(ended[each] - began[each], 0.0) for each in began.keys() & ended.keys())
    return Task(log=log, end=end, seconds=seconds, time_was_up=(attempt / "requeue").exists())


class CellState(StrEnum):
    """Done: its last step is recorded. Spent: its time is, so it counts as it is. Pending: it is in Slurm's queue.

    Lost: its job is gone and did not say how it ended. Stopped: a start goes on with it.
    """

    DONE = "done"
    SPENT = "spent"
    RUNNING = "running"
    PENDING = "pending"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"
    WAITING = "waiting"


STARTABLE = (CellState.STOPPED, CellState.WAITING, CellState.LOST)
"""The states of cells that the next start of the study takes, without being asked to try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """What a study knows of a cell: the process of its last start, and how that ended.

    ``status`` is its exit status, below 0 a signal's number; None while it runs. ``seconds`` are those of all starts
    since its folder was made. ``step`` is the last one recorded when it ended: a failed run that has a later one was
    resumed by hand.
    A cell in Slurm's hands has no process here: ``task`` is its array's task, as 12_3, which may run for ``granted``
    seconds (None: as long as it needs), not counted in ``seconds``.
    """

    pid: int
    began: str  # `birth_of` the process: a number alone is given out again
    starts: int
    seconds: float
    status: int | None = None
    reason: str = ""
    step: int | None = None
    task: str = ""
    granted: float | None = None

    def ended(self, *, status: int, reason: str, seconds: float, step: int) -> CellRecord:
        """The record of a process that has ended after so many seconds, at this step."""
        return replace(self, status=status, reason=reason, seconds=self.seconds + seconds, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStanding:
    """A cell and what has become of it. ``value`` is the last of the study's metric, None if that is not finite."""

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
        return CellRecord(**parse(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not the record of a cell ({error}); remove it to start the cell again") from error


def write_record(cell: Cell, record: CellRecord) -> None:
    """Atomically. Raises OSError."""
    path = record_path(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(record)).encode())


def find_states(study: Study, cells: Sequence[Cell], queue: Mapping[str, Queued] | None = None) -> list[CellStanding]:
    """What has become of each cell, in their order. A cell with a broken metrics.jsonl has failed, by that reason.

    ``queue`` is what Slurm says of tasks that have not said that they ended; None: it was not asked.
    """
    return [_found(study, cell, queue) for cell in cells]


def unsettled(cells: Sequence[Cell]) -> list[str]:
    """The tasks of cells that were sent to Slurm and have not said that they ended."""
    tasks = [(cell, record.task) for cell in cells if (record := read_record(cell)) is not None and record.task]
    return [task for cell, task in tasks if not read_task(cell, task).end]


def last_step(cell: Cell) -> int:
    """The last step of RL that is recorded, from the file's end, however long that is; 0 if there is none."""
    path = cell.folder / "metrics.jsonl"
    try:
        row = next((row for row in from_the_end(path) if row.get("phase") != "eval"), None)
    except (FileNotFoundError, DataError):  # `find_states` says what is wrong
        return 0
    return int(number(row, "step") or 0) if row is not None and row.get("phase") in STEPS else 0


def seconds_of(cell: Cell, record: CellRecord) -> float:
    """Of all its starts, those by Slurm too; none where its folder was removed, so that it begins again."""
    if not cell.folder.is_dir():
        return 0.0
    return record.seconds + (read_task(cell, record.task).seconds if record.task else 0.0)


def time_was_up(cell: Cell, record: CellRecord) -> bool:
    """Whether the cell's task in Slurm ended because its time was over."""
    task = read_task(cell, record.task)
    return bool(task.end) and task.time_was_up


def drift_of(cell: Cell) -> str:
    """How what the cell ran with differs from what it would run with now, as by another version's defaults; or empty.

    Its folder's name does not tell: that is of the values that differ from the defaults.
    """
    path = cell.folder / "config.yaml"
    if not path.is_file():
        return ""
    then, now = dict(numbers_of(yaml_text.read(path))), dict(numbers_of(cell.config.model_dump(mode="json")))
    changed = [f"{key}={shorten(then[key])}" for key in then.keys() & now.keys() if then[key] != now[key]]
    wanted = [f"{key}={shorten(now[key])}" for key in then.keys() & now.keys() if then[key] != now[key]]
    if not changed:
        return ""
    return (
        f"it ran with {', '.join(sorted(changed))}; now it would with {', '.join(sorted(wanted))}: remove it to repeat"
    )


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
    if record.status is not None or record.task:
        return False
    birth = birth_of(record.pid)
    return bool(birth) and birth == record.began


def birth_of(pid: int) -> str:
    """The machine's boot and the ticks after it at which a running process began, which no change of the clock alters;
    empty of one that has ended."""
    ticks = began(pid)
    return "" if ticks is None else f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {ticks}"


def _found(study: Study, cell: Cell, queue: Mapping[str, Queued] | None) -> CellStanding:
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
    if record is not None and record.task:
        state, reason = _state_in_queue(study, cell, record, queue, ended=ended)
    else:
        state, reason = _state(study, cell, record, step, ended=ended)
    if broken and state not in {CellState.RUNNING, CellState.PENDING}:
        state, reason = CellState.FAILED, broken
    return CellStanding(
        cell=cell,
        state=state,
        recorded=recorded and not broken,
        step=step,
        value=value,
        seconds=seconds_of(cell, record) if record else 0.0,
        reason=reason,
    )


def _rows(cell: Cell) -> Iterator[JsonRow]:
    """The rows of RL and of evaluations beside it, the last one first; before them there are those of a warm start."""
    path = cell.folder / "metrics.jsonl"
    if path.is_file():
        yield from itertools.takewhile(lambda row: row.get("phase") != "warm_start", from_the_end(path))


def _state(study: Study, cell: Cell, record: CellRecord | None, step: int, *, ended: bool) -> tuple[CellState, str]:
    if record is not None and is_running(record):
        return CellState.RUNNING, ""
    if record is not None and record.status and (record.step is None or step <= record.step):
        return CellState.FAILED, record.reason
    if ended:
        return CellState.DONE, ""
    limit = study.budget.cell_minutes
    if record is not None and limit is not None and seconds_of(cell, record) >= 60 * limit:
        late = f"; {record.reason}" if record.reason else ""
        return CellState.SPENT, f"budget.cell_minutes={limit:g} are over{late}"
    return (CellState.STOPPED if cell.folder.is_dir() else CellState.WAITING), ""


def _state_in_queue(
    study: Study, cell: Cell, record: CellRecord, queue: Mapping[str, Queued] | None, *, ended: bool
) -> tuple[CellState, str]:
    """Of a cell that Slurm has: by its own last words, else by Slurm's."""
    task = read_task(cell, record.task)
    slurm, called = (queue or {}).get(record.task), f"job {record.task}"
    if not task.end and slurm is not None and (slurm.waits or slurm.runs):
        return (CellState.PENDING if slurm.waits else CellState.RUNNING), f"{called}: {slurm.text}"
    if task.failed and not _resumed_since(cell, task):
        return CellState.FAILED, f"{called}: {task.end}"
    if ended:
        return CellState.DONE, ""
    limit = study.budget.cell_minutes
    granted = record.granted is not None and limit is not None and record.seconds + record.granted >= 60 * limit
    if granted and time_was_up(cell, record):
        return CellState.SPENT, f"budget.cell_minutes={limit:g} are over"
    if slurm is not None and slurm.failed:
        return CellState.FAILED, f"{called}: {slurm.text}; {task.log} has what it printed"
    if task.end or (slurm is not None and slurm.word == "CANCELLED"):
        return CellState.STOPPED, f"{called}: {slurm.text}" if slurm is not None else ""
    asked = "Slurm could not be asked here" if queue is None else "Slurm has forgotten it"
    return CellState.LOST, f"{called}: {slurm.text if slurm is not None else asked}; it has not said how it ended"


def _resumed_since(cell: Cell, task: Task) -> bool:
    """Whether the run has recorded a step after its job's last line."""
    rows = cell.folder / "metrics.jsonl"
    return rows.is_file() and rows.stat().st_mtime > task.log.stat().st_mtime
