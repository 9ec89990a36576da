"""``rl-megatron submit``: checks a configuration and sends it as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.hosts.slurm.jobs import job_commands
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError


def submit(
    config: Annotated[str, typer.Argument(help="a name under conf/, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write and check the script, but do not submit it")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="submit two steps of the run instead, kill them, wait for the resume; status 1 if it fails"
        ),
    ] = False,
) -> None:
    """Train on a Slurm cluster: check the configuration, write the job's script to runs/<name>/ and submit it."""
    from launcher.programs import submit as program
    from launcher.programs.smoke import SUFFIX, smoke_of
    from launcher.programs.smoke import smoke as watch

    if smoke and dry_run:
        raise ConfigError("--smoke submits a job and waits for it, but --dry-run submits none; leave one out")
    loaded, stem = load_config(config, overrides or []), Path(config).stem
    if smoke:
        loaded, stem = smoke_of(program.for_slurm(loaded)), f"{stem}{SUFFIX}"
    with program.prepare(loaded, stem) as job:
        print(job.checked.describe(), job.findings.describe(), sep="\n", flush=True)
        program.verify_script(job, cluster=not dry_run)
        if dry_run:
            print(f"nothing was sent; this sends it: sbatch {job.script}")
            return
        sent = program.send(job)
        commands = job_commands(job.folder, sent, array=bool(loaded.slurm.array))
        print(f"job {sent}: {job.folder}", *commands, sep="\n", flush=True)
    if smoke and not watch(loaded, job.folder, sent):
        raise typer.Exit(1)
