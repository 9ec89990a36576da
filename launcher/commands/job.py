"""``rl-megatron status``: the job of a run, by the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.hosts.slurm import jobs


def status(run: Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]) -> None:
    """Show the state of a run, or of its job, its last step, and the commands that follow and end the job."""
    print(jobs.describe(run))
