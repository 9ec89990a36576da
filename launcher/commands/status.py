"""``rl-megatron status``: finds the Slurm job of a run's folder, its state and its logs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from launcher.hosts.slurm.calls import call_slurm
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.observability.files import STEPS, JsonValue, from_the_end, text_at_end
from rl_megatron.observability.log import last_line, read_outcome
from rl_megatron.observability.progress import Progress

_READ_BYTES = 1 << 26  # a longer metrics.jsonl is not read for verdicts: this one takes a second
_ROWS = 1000  # rows at the end that may have an accuracy
_EVALUATED = re.compile(r"step \d+ evaluated")


def status(run: Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]) -> None:
    """Show the state of a run or its job, its last step, and the commands that follow or end the job."""
    print(describe(run))


def describe(run: Path) -> str:
    """Returns a run's state from Slurm and its own files, the last line of its job's log, and commands for that job.

    For a run without a job: whether it runs or why it ended, its last step, and what it logged last; for both the
    verdicts of the report. Raises ConfigError if the folder holds no run.
    """
    found = _current(run)
    if found is None and not (run / "config.yaml").is_file():  # its log may have been rotated
        folder = "; `rl-megatron experiment status STUDY.yaml` lists a study's" if (run / "cells").is_dir() else ""
        raise ConfigError(f"{run}: not a run's folder, and no job was submitted from it; give a run's folder{folder}")
    try:
        from rl_megatron.config.io import load_config  # takes most of a second

        config = load_config(str(run / "config.yaml"), [])
    except ConfigError:  # another version wrote it
        config = None
    total = config.train.steps if config else 0
    steps, done = _steps(run, total)
    steps += _verdicts(run, config is None or config.algorithm.needs_differences)
    if found is None:
        return "\n".join(_describe_local(run, steps, done if 0 < total <= done else None))
    lines = [f"{run}: job {found[0]}, {found[1].text}", *steps]
    log = run / "jobs" / f"{found[0]}.txt"
    if log.is_file() and (said := text_at_end(log).splitlines()):
        lines.append(said[-1])
    return "\n".join([*lines, *job_commands(run, found[0], over=found[1].over)])


def _describe_local(run: Path, steps: Sequence[str], last_step: int | None) -> list[str]:
    """Returns lines about a run here: whether it is alive, how it ended and why, and the command that continues it.
    ``last_step`` is given if all steps are made."""
    from launcher.runs.folder import is_running

    outcome, why = read_outcome(run) or ("", "")
    resume = f"rl-megatron train --config {shlex.quote(str(run))}/config.yaml --resume"
    last = last_line(run) or ""
    is_exported = last_step is not None and (run / f"hf_step_{last_step:06d}").is_dir()
    if (runs := is_running(run)) is None:
        how, end = "state unknown, because its file system has no locks", [last]
    elif runs:
        how, end = "running", [last]
    elif outcome in ("failed", "interrupted", "stopped"):
        how, end = outcome, [f"error: {why}" if why else "", resume]
    elif outcome == "finished" or is_exported or (last_step is not None and not outcome):
        how, end = "done", []
    elif outcome == "began":
        how, end = "killed: its process is gone, and log.txt does not say why", [last, resume]
    else:
        how, end = "not running", [resume]
    return [f"{run}: {how}", *steps, *filter(None, end)]


def _verdicts(run: Path, needs_differences: bool) -> list[str]:
    """Returns the lines of the report's verdicts, and its path; no verdicts of metrics that take long to read."""
    metrics, page = run / "metrics.jsonl", run / "report.html"
    found = list[str]()
    if metrics.is_file() and metrics.stat().st_size < _READ_BYTES:
        from rl_megatron.observability.card import find_verdicts  # takes a tenth of a second
        from rl_megatron.observability.history import load_runs
        from rl_megatron.observability.verdicts import describe_verdicts

        with contextlib.suppress(DataError, OSError):
            (loaded,) = load_runs([run], lambda message: None)
            found = describe_verdicts(find_verdicts(loaded, needs_differences=needs_differences))
    return [*found, *([f"report: {page}"] if page.is_file() else [])]


def _steps(run: Path, total: int) -> tuple[list[str], int]:
    """Returns the run's lines of its last accuracy and last step of ``total``, and the number of that step."""
    metrics, rows, text = run / "metrics.jsonl", list[dict[str, JsonValue]](), StringIO()
    try:
        for row in islice(from_the_end(metrics) if metrics.is_file() else (), _ROWS):
            rows.append(row)
            if "eval/accuracy" in row:
                break
    except DataError:
        if not rows:
            raise
    progress = Progress(total, "plain", console=Console(file=text))
    for row in reversed(rows):
        progress.step(row)
    printed = text.getvalue().splitlines()
    last = [line for line in printed if not _EVALUATED.match(line)][-1:] or ["no step yet"]
    best = [line for line in printed if " accuracy=" in line and line not in last]
    return [*best, *last], max((int(str(row["step"])) for row in rows if row.get("phase") in STEPS), default=0)


def job_commands(run: Path, job: str, *, over: bool = False) -> list[str]:
    """Returns lines to type, which show what a job prints in its newest attempt, and end the job."""
    attempts = (run / "jobs").glob(f"{job}-*")
    attempt = max(attempts, key=lambda path: int(path.name.rpartition("-")[2]), default=run / "jobs" / f"{job}-0")
    files = [run / "jobs" / f"{job}.txt", attempt / "controller.txt"]
    shown = " ".join(shlex.quote(str(path)) for path in files if not over or path.is_file())
    lines = [f"{'less' if over else 'tail -F'} {shown}"] if shown else []
    if over:  # another job may have its number by now
        return lines
    clusters = os.environ.get("SBATCH_CLUSTERS")  # scancel does not read it
    return [*lines, " ".join(["scancel", *([f"--clusters={shlex.quote(clusters)}"] if clusters else []), job])]


def _current(run: Path) -> tuple[str, Status] | None:
    """Returns the run's job and its status: the job of ``jobs/id`` or, if that is over, preferably one sent by hand.

    None if there is none. Raises ConfigError if Slurm does not answer.
    """
    given = run / "jobs" / "id"
    known = (job := given.read_text().strip(), job_status(job, run)) if given.is_file() else None
    return known if known and not known[1].over else _sent_by_hand(run) or known


def _sent_by_hand(run: Path) -> tuple[str, Status] | None:
    """Returns a job of the run's script that has not ended: it writes its number to ``jobs/id`` only as it begins."""
    if not (run / "job.sbatch").is_file() or not shutil.which("squeue"):
        return None
    folder = run.resolve()
    said = _known("squeue", "--noheader", f"--name={folder.name}", "--format=%F").split()
    for job in sorted({word for word in said if word.isdigit()}, key=int, reverse=True):
        logs = [part["StdOut"] for part in _shown(job) if part.get("StdOut")]
        its = folder / "jobs" in (Path(log).resolve().parent for log in logs)  # a run elsewhere may have its name
        if its and not (status := job_status(job, run)).over:
            return job, status
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A job's state in Slurm's word, and a line with the reason for waiting, the nodes and restarts."""

    name: str
    text: str

    @property
    def over(self) -> bool:
        """True if the job has ended for good."""
        return self.name in _OVER


_OVER = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "REVOKED", "GONE"),
}


def job_status(job: str, run: Path) -> Status:
    """Returns the status of the job of ``run``, from Slurm's controller or accounting. The controller's job of that
    number is another's if it prints elsewhere: numbers are given out again.

    Raises ConfigError where Slurm is not installed or does not answer, which is not to say that the job has ended.
    """
    named = [one for one in _shown(job) if one.get("JobId") == job]
    for found in (one for one in named if _prints_for(run, job, one.get("StdOut", ""))):
        nodes = found.get("NodeList", "")
        on = "" if nodes in ("", "(null)") else f" on {nodes}"
        return Status(name=found["JobState"], text=f"{_state(found)}{on}, restart {found.get('Restarts', '0')}")
    if not named and shutil.which("sacct"):  # otherwise it would report the job that has the number now
        said = _known("sacct", "-X", "-n", "-P", "-j", job, "-o", "State").splitlines()
        if states := list(filter(None, said)):
            return Status(name=states[0].split()[0], text=states[0])
    return Status(name="GONE", text="forgotten by Slurm")


def _shown(job: str) -> list[dict[str, str]]:
    """Returns the fields of a job in Slurm's controller, one entry; empty once Slurm has forgotten it."""
    shown = _known("scontrol", "show", "job", "-o", job).splitlines()
    # The first entry of a name counts, because a later comment may hold any text.
    return [dict(reversed(re.findall(r"(\S+?)=(\S*)", line))) for line in shown]


def _state(part: Mapping[str, str]) -> str:
    """Returns the state with its reason, for example PENDING (Resources)."""
    reason = part.get("Reason", "None")
    return part["JobState"] if reason == "None" else f"{part['JobState']} ({reason})"


def _prints_for(run: Path, job: str, log: str) -> bool:
    """True if a job's output goes to ``jobs`` of ``run``, or to the target of ``jobs/<job>.txt`` (slurm/job.sh).

    The number is not a proof: a copied folder has it. True also if Slurm does not report the output, or if spaces in
    the folder's name cut it short.
    """
    folder, told = run.resolve(), (run / "jobs" / f"{job}.txt").resolve()
    return (
        not log or " " in f"{folder}{told}" or (path := Path(log).resolve()) == told or path.parent == folder / "jobs"
    )


def _known(*command: str) -> str:
    """Returns Slurm's output; empty for jobs that it has forgotten or keeps no accounts of.

    Raises ConfigError if it does not answer.
    """
    try:
        return call_slurm(command)
    except ConfigError as error:
        if "Invalid job id" in str(error) or "accounting storage is disabled" in str(error):
            return ""
        raise
