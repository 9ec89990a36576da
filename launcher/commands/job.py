"""``rl-megatron status | logs | attach | cancel``: the job of a run, by the run's folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.control.address import Address
from launcher.hosts.slurm import jobs
from launcher.hosts.slurm.attach import follow
from launcher.hosts.slurm.calls import outside_jobs

RunFolder = Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]


def ask_there(run: Path, address: Address) -> None:
    """Run this command on the controller's node instead, in the run's job, if that is another. Raises ConfigError if it
    has none."""
    if not address.here:
        command = [*jobs.srun_beside(run, address), sys.executable, "-P", "-m", "launcher", *sys.argv[1:]]
        os.execvpe(command[0], command, outside_jobs())


def status(run: RunFolder) -> None:
    """Show the state of a run, or of its job, and its last step."""
    print(jobs.describe(run))


def logs(
    run: RunFolder,
    which: Annotated[str, typer.Argument(help="job, controller, step, or rank-<number>")] = "controller",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep showing new lines, until Ctrl-C")] = False,
) -> None:
    """Show what a part of the run's job printed since its last restart."""
    sys.stdout.flush()
    os.execvp("tail", ["tail", *(["-F"] if follow else []), "-n", "+1", str(jobs.log_file(run, which))])


def attach(run: RunFolder) -> None:
    """Follow a running job, over its restarts, until its end; Ctrl-C leaves it running. Status 1 if it failed."""
    try:
        if not follow(run, lambda line: print(line, flush=True)):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        print("detached; the job goes on", file=sys.stderr)


def cancel(run: RunFolder) -> None:
    """End the job of a run for good; its last checkpoint stays."""
    print(f"job {jobs.cancel(run)} cancelled")
