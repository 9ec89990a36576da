"""``rl-megatron submit``: checks a configuration and sends it as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.rehearse import HideHosts
from launcher.hosts.slurm.jobs import job_commands
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError


def submit(
    config: Annotated[str, typer.Argument(help="a name under conf/, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write and check the script, but do not submit it")
    ] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="submit a rehearsal on the run's own nodes instead")
    ] = False,
    hide_hosts: HideHosts = False,
) -> None:
    """Train on a Slurm cluster: check the configuration, write the job's script to runs/<name>/ and submit it."""
    from launcher.programs import submit as program

    if hide_hosts and not rehearse:
        raise ConfigError("--hide-hosts goes with --rehearse: a run writes no file that is meant for others")
    loaded, stem = load_config(config, overrides or []), Path(config).stem
    if rehearse:
        from launcher.rehearsal.settings import SUFFIX, rehearsal_of

        loaded, stem = rehearsal_of(program.for_slurm(loaded)), f"{stem}{SUFFIX}"
    options = ("--hide-hosts",) if hide_hosts else ()
    with program.prepare(loaded, stem, command=("rehearse", *options) if rehearse else ("train",)) as job:
        print(job.checked.describe(), job.findings.describe(), sep="\n", flush=True)
        if rehearse:
            from launcher.rehearsal.settings import announced

            print(*announced(loaded), sep="\n", flush=True)
        program.verify_script(job, cluster=not dry_run)
        if dry_run:
            print(f"nothing was sent; this sends it: sbatch {job.script}")
            return
        sent = program.send(job)
        print(f"job {sent}: {job.folder}", *job_commands(job.folder, sent, array=bool(loaded.slurm.array)), sep="\n")
