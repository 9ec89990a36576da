"""Cells that were sent to Slurm: what it says of their tasks, and what the tasks' scripts have said (slurm/job.sh)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rl_megatron.experiments.cells import Cell

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
