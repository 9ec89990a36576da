"""``rl-megatron report``: one page of one run, or comparing several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; several are compared", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="the HTML file [default: report.html in the first run]")] = None,
) -> None:
    """Write a self-contained report.html of one run, or comparing several."""
    from rl_megatron.observability.report import write_report

    print(write_report(runs, out or runs[0] / "report.html"))
