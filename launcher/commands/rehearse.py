"""``rl-megatron rehearse``: a rehearsal on this machine, or inside the job that ``submit --rehearse`` sends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.runs.name import choose
from rl_megatron.config.io import load_config

HideHosts = Annotated[bool, typer.Option("--hide-hosts", help="give nodes other names in rehearsal.json")]


def rehearse(
    config: Annotated[str, typer.Argument(help="a name under conf/, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    hide_hosts: HideHosts = False,
) -> None:
    """Rehearse a run here in minutes: nodes, links and disks, two steps, a save, a killed rank, a resume; no training.

    Status 1 if a stage failed. runs/<name>-rehearsal/rehearsal.json holds all that was measured.
    """
    from launcher.preflight.checks import preflight
    from launcher.programs.rehearse import Rehearsal
    from launcher.rehearsal.settings import SUFFIX, rehearsal_of

    job = rehearsal_of(load_config(config, overrides or []))
    named = job if job.run.name is not None else choose(job, f"{Path(config).stem}{SUFFIX}", resume=False)
    findings = preflight(named)
    findings.raise_problems()
    rehearsal = Rehearsal(named, hide_hosts=hide_hosts)
    report = rehearsal.run()
    print(report.text(), end="")
    print(f"to send: {rehearsal.folder / 'rehearsal.json'}", flush=True)
    if report.failures:
        raise typer.Exit(1)
