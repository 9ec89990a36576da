"""``rl-megatron status | logs | cancel``: the job of a run, by the run's folder."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import read_jsonl


def status(run: Path) -> str:
    """What Slurm and the run's own files say: state, reason, last step, and the last line of the job's log."""
    job = _job(run)
    lines = [f"{run}: job {job}, {_state(job)}"]
    metrics = run / "metrics.jsonl"
    steps = [row["step"] for row in read_jsonl(metrics) if row.get("phase") == "rl"] if metrics.is_file() else []
    lines.append(f"step {steps[-1]}" if steps else "no step yet")
    log = run / "jobs" / f"{job}.txt"
    if log.is_file() and (said := log.read_text(errors="replace").splitlines()):
        lines.append(said[-1])
    return "\n".join(lines)


def log_file(run: Path, which: str) -> Path:
    """The newest log of a role: ``job``, ``controller``, ``step`` or ``rank-0``. Raises ConfigError naming all."""
    job = _job(run)
    if which == "job":
        return run / "jobs" / f"{job}.txt"
    attempts = sorted((run / "jobs").glob(f"{job}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not attempts:
        raise ConfigError(f"{run}: job {job} has not started; its log comes with its start")
    path = attempts[-1] / f"{which}.txt"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in attempts[-1].glob("*.txt")))
        raise ConfigError(f"{path} is not there; one of: job, {names}")
    return path


def cancel(run: Path) -> str:
    """End the run's job for good; its id."""
    job = _job(run)
    _slurm("scancel", job)
    return job


def _job(run: Path) -> str:
    path = run / "jobs" / "id"
    if not path.is_file():
        raise ConfigError(f"{run}: no job was sent from there; send one with rl-megatron submit")
    return path.read_text().strip()


def _state(job: str) -> str:
    """The state with the reason for waiting and the nodes, from the controller's memory or from accounting."""
    shown = _slurm("scontrol", "show", "job", "-o", job, check=False)
    found = dict(re.findall(r"(\S+?)=(\S+)", shown))
    if "JobState" in found:
        waits = f" ({found['Reason']})" if found.get("Reason", "None") != "None" else ""
        nodes = f" on {found['NodeList']}" if found.get("NodeList", "(null)") != "(null)" else ""
        return f"{found['JobState']}{waits}{nodes}, restart {found.get('Restarts', '0')}"
    if shutil.which("sacct"):
        said = _slurm("sacct", "-X", "-n", "-P", "-j", job, "-o", "State", check=False).split("\n")[0]
        return said or "gone from Slurm's memory"
    return "gone from Slurm's memory"


def _slurm(*command: str, check: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{command[0]} is not here; this is no node of a Slurm cluster") from error
    if check and done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
