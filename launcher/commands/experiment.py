"""``rl-megatron experiment``: runs a study of many cells, and says what has become of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.experiments.cells import Cell, cells_of
from rl_megatron.experiments.states import CellState, find_states, states_table
from rl_megatron.experiments.study import Study, read_study

app = typer.Typer(no_args_is_help=True, help="Run a study: a grid of runs with seeds, from one file.")
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="the study's file", show_default=False)]


@app.command()
def run(
    study: StudyFile,
    retry: Annotated[bool, typer.Option("--retry", help="start cells again that have failed")] = False,
    check: Annotated[bool, typer.Option("--check", help="check all cells, and start none")] = False,
) -> None:
    """Run the cells that are not done, side by side, each as a run of its own that can be resumed.

    Ctrl-C has all of them save and ends with status 0; started again, the study goes on. The status is 1 if a cell has
    failed.
    """
    loaded, cells = _checked(study)
    from launcher.programs.experiment import cells_at_once, run_cells

    if check:
        print(f"{len(cells)} cells, {cells_at_once(loaded, cells)} at once; nothing is wrong with any")
        return
    found = asyncio.run(run_cells(loaded, cells, retry=retry))
    print(states_table(found))
    if any(each.state is CellState.FAILED for each in found):
        raise typer.Exit(1)


@app.command()
def status(study: StudyFile) -> None:
    """Print each cell: done, running, failed with the reason, or waiting."""
    loaded = read_study(study)
    print(states_table(find_states(loaded, cells_of(loaded))))


@app.command()
def report(
    study: StudyFile,
    out: Annotated[Path | None, typer.Option(help="the HTML file [default: report.html in the study's folder]")] = None,
) -> None:
    """Write the page over all runs, with differences, fits and survival; beside it JSON, CSV and SVG."""
    from rl_megatron.experiments.report import write_study_report

    loaded = read_study(study)
    assert loaded.folder is not None
    print(write_study_report(loaded, cells_of(loaded), out or loaded.folder / "report.html"))


def _checked(path: Path) -> tuple[Study, list[Cell]]:
    """The study and its cells, each of which could start on this machine."""
    from launcher.preflight.checks import preflight
    from rl_megatron.errors import ConfigError

    study = read_study(path)
    cells = cells_of(study)
    arms = {cell.arm: cell for cell in reversed(cells)}  # a seed changes nothing here
    lines = [f"{arm}: {text}" for arm, cell in arms.items() for text in preflight(cell.config).texts("problem")]
    if lines:
        raise ConfigError("\n".join(lines))
    return study, cells
