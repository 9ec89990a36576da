"""``rl-megatron profile``: has a running run record the kernels of its next steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.job import RunFolder, ask_there
from launcher.control.address import address_of
from launcher.control.client import ask_run
from rl_megatron.errors import ConfigError


def profile(
    run: RunFolder,
    steps: Annotated[int, typer.Option(help="how many of its next steps")] = 1,
    rank: Annotated[
        list[int] | None, typer.Option(help="of each role; again for more [default: profile.ranks]", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="the whole timeline, for ui.perfetto.dev [default: profile/timeline.json.gz in the run]"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="the longest to wait [default: until it is done]", show_default=False)
    ] = None,
) -> None:
    """Record kernels and operators of a running run's next steps, and write them with its timeline.

    Ctrl-C and --seconds end the waiting alone. Of a Slurm job, it asks on the controller's node, by srun.
    """
    from rl_megatron.observability.timeline.kernels import FOLDER
    from rl_megatron.observability.timeline.trace import write_trace

    ask_there(run, address_of(run))
    if out is not None and not out.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--out {out}: give a name that ends in .json or .json.gz")
    try:
        for folder in ask_run(run, "profile", seconds=seconds, steps=steps, ranks=rank or []):
            print(folder)
    except KeyboardInterrupt:
        print(f"not waited for; what it records will be in {run / FOLDER}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(write_trace(run, out or run / FOLDER / "timeline.json.gz"))
