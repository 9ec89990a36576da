"""``rl-megatron report``: writes a page about one run, or one that compares several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; the report compares several", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="the HTML file [default: report.html in the first run]")] = None,
) -> None:
    """Write a self-contained report.html about one run, or one that compares several."""
    from rl_megatron.observability.report import write_report

    print(write_report(runs, out or runs[0] / "report.html"))
