"""``rl-megatron report``: writes a page about one run, or one that compares several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; the report compares several", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="the HTML file [default: report.html in the run; of several, comparison.html]")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="also write the timeline of one run, for ui.perfetto.dev; .gz compresses it")
    ] = None,
) -> None:
    """Write a self-contained page about one run, or one that compares several, into the folder of the first."""
    from launcher.programs.spent import costs_of_run
    from rl_megatron.errors import ConfigError
    from rl_megatron.observability.report import write_report
    from rl_megatron.observability.timeline.trace import write_trace

    if trace is not None and len(runs) > 1:
        raise ConfigError(f"--trace writes the timeline of one run, but {len(runs)} folders are given; give one")
    costs = costs_of_run(runs[0]) if len(runs) == 1 else None
    page = runs[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    print(write_report(runs, out or page, costs=costs))
    if trace is not None:
        print(write_trace(runs[0], trace))
