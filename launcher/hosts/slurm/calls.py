"""Calls the commands of Slurm, with a limit: its controller serves many users, and may be gone."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rl_megatron.errors import ConfigError

ANSWER_SECONDS = 60.0  # limit of a query or cancel command; its own limit differs by cluster
SENT_SECONDS = 300.0  # limit of sbatch, because a cluster's plugins check its jobs
_NO_JOBS = ("SLURM_CONF", "SLURM_CLUSTERS")  # no surrounding job sets these
_VARIABLES = {
    "time": ("TIMELIMIT",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    **dict.fromkeys(("requeue", "no-requeue"), ("REQUEUE", "NO_REQUEUE")),
}
"""The variables of sbatch, without SBATCH_, that replace an option, where they are not just its name."""


def _outside_jobs() -> dict[str, str]:
    """Returns this process's variables without its Slurm job's, which Slurm's commands would take for options."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NO_JOBS or not name.startswith(("SLURM_", "SRUN_"))
    }
    if (clusters := kept.pop("SBATCH_CLUSTERS", None)) is not None:  # other commands ask the cluster that sbatch used
        kept["SLURM_CLUSTERS"] = clusters
    return kept


def call_slurm(command: Sequence[str], script: Path | None = None) -> str:
    """Returns what a command prints, run outside of any job of this process. ``script`` is sbatch's: the user's SBATCH_
    variables set only options that it leaves open, whereas sbatch itself lets them replace its options.

    Raises ConfigError with its errors, or if it does not answer in time.
    """
    command = command if script is None else [*command, str(script)]
    stated = set() if script is None else _stated(script.read_text(encoding="utf-8"))
    kept = {name: value for name, value in _outside_jobs().items() if name not in stated}
    kept.pop("SBATCH_WAIT", None)  # it would wait until the job ends
    seconds, shown = SENT_SECONDS if command[0] == "sbatch" else ANSWER_SECONDS, shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=kept, timeout=seconds)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{command[0]} is not installed here; run this on a node of a Slurm cluster, or submit with --dry-run"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{shown}: no answer in {seconds:g} s; sinfo says whether Slurm answers, squeue which jobs it has taken, "
            "and a run's folder has its logs (jobs/)"
        ) from error
    if done.returncode:
        raise ConfigError(f"{shown}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _stated(script: str) -> set[str]:
    """Returns the variables that would replace options of a script."""
    options = re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)
    names = (name for option in options for name in _VARIABLES.get(option, (option.upper().replace("-", "_"),)))
    return {f"SBATCH_{name}" for name in names}


def parse_script(script: str) -> None:
    """Makes bash read a job's script, without running it. Raises ConfigError with its message."""
    try:
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, env=dict(os.environ), timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"bash -n has not read the job's script in {ANSWER_SECONDS:g} s") from error
    if done.returncode:
        raise ConfigError(f"bash -n: status {done.returncode}\n{done.stderr.strip()}")
