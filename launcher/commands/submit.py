"""``rl-megatron submit``: checks a configuration and sends it as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.runs.name import choose
from rl_megatron.config.io import load_config


def submit(
    config: Annotated[str, typer.Argument(help="a name under conf/, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write and check the script, but do not submit it")
    ] = False,
) -> None:
    """Train on a Slurm cluster: check the configuration, write the job's script to runs/<name>/ and submit it."""
    from launcher.programs import submit as program

    loaded = load_config(config, overrides or [])
    named = choose(loaded, Path(config).stem, resume=False, taken=program.taken)
    prepared = program.prepare(named)
    print(prepared.checked.describe(), prepared.findings.describe(), sep="\n", flush=True)
    program.verify_script(prepared, cluster=not dry_run)
    sends = f"nothing was sent; this sends it: sbatch {prepared.script}"
    print(sends if dry_run else f"job {program.send(prepared)}: {prepared.folder}")
