"""``rl-megatron status``: the job of a run, by the run's folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.control.address import Address
from launcher.hosts.slurm import jobs
from launcher.hosts.slurm.calls import outside_jobs

RunFolder = Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]


def ask_there(run: Path, address: Address) -> None:
    """Run this command on the controller's node instead, in the run's job, if that is another. Raises ConfigError if it
    has none."""
    if not address.here:
        command = [*jobs.srun_beside(run, address), sys.executable, "-P", "-m", "launcher", *sys.argv[1:]]
        os.execvpe(command[0], command, outside_jobs())


def status(run: RunFolder) -> None:
    """Show the state of a run, or of its job, its last step, and the commands that follow and end the job."""
    print(jobs.describe(run))
