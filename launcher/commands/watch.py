"""``rl-megatron watch``: the report of a run in a browser, while it trains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def watch(
    runs: Annotated[list[Path], typer.Argument(help="run folders; several are compared", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="on 127.0.0.1; 0: a free one")] = 0,
) -> None:
    """Show the report of runs in a browser of this machine, as they train, and search their samples; until Ctrl-C."""
    from launcher.programs.spent import costs_of_run
    from launcher.watch.serving import watch_runs

    asyncio.run(watch_runs(runs, port, costs_of_run))
