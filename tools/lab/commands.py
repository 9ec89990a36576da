"""``rl-megatron experiment`` runs studies of many cells, and ``doctor mismatch`` finds why log-probs differ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher.completion import Overrides
from rl_megatron.errors import ConfigError
from tools.lab.states import CellState, describe_drift, find_states, states_table, write_config
from tools.lab.study import Cell, Study, outcome_folder, read_study, study_cells

app = typer.Typer(add_completion=False, no_args_is_help=True)
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="the study's file", show_default=False)]
More = Annotated[
    list[str] | None,
    typer.Option(
        "--override", metavar="KEY=VALUE", help="an extra override for every cell; a changed cell is a new run"
    ),
]


@app.callback()
def experiment() -> None:
    """Run a study: a grid of runs with seeds, from one file."""


@app.command()
def run(
    study: StudyFile,
    override: More = None,
    retry: Annotated[bool, typer.Option("--retry", help="start cells again that have failed")] = False,
    check: Annotated[bool, typer.Option("--check", help="check all cells, write their files, and start none")] = False,
) -> None:
    """Run the cells that are not done, several at the same time, each as a run of its own that can be resumed.

    Ctrl-C makes all of them save and ends with status 0. The same command continues the study. The status is 1 if a
    cell has failed.
    """
    loaded, cells = _checked(study, override or [])
    from tools.lab.run import max_running_cells, run_cells

    if check:
        at_once = max_running_cells(loaded, cells)
        for cell in cells:
            write_config(cell)
        print(
            f"{len(cells)} cells, {at_once} at once; nothing is wrong with any; {loaded.folder}/cells has their files"
        )
        return
    found = asyncio.run(run_cells(loaded, cells, retry=retry))
    print(states_table(loaded, found))
    if any(each.state is CellState.FAILED for each in found):
        raise typer.Exit(1)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit() -> None:
    """Raises ConfigError that says what to do instead: version 0.3.0 sent cells to Slurm as tasks of an array."""
    raise ConfigError(
        "no command 'experiment submit' any longer; `experiment run STUDY.yaml --check` writes a file for each cell, "
        "which `rl-megatron submit` takes (docs/evaluation.md)"
    )


@app.command()
def status(study: StudyFile, override: More = None) -> None:
    """Print each cell: done, running, stopped, failed with the reason, or waiting."""
    loaded = read_study(study, override or [])
    cells = study_cells(loaded)
    found = find_states(loaded, cells)
    print(states_table(loaded, found))
    for each in found:
        if each.state in {CellState.DONE, CellState.SPENT} and (line := describe_drift(each.cell)):
            print(f"note: {each.cell.name}: {line}")


@app.command()
def report(
    study: StudyFile,
    override: More = None,
    metric: Annotated[
        str | None, typer.Option(help="compare this metric [default: the study's evaluation.metric]")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="the mean of its last so many values")] = None,
    out: Annotated[Path | None, typer.Option(help="the HTML file [default: report.html in that folder]")] = None,
) -> None:
    """Write the page over all runs, with differences and fits, and the same figures as JSON and CSV.

    With --metric, --last or --override it is written into a folder named by them, so that a study's outcomes do not
    replace one another.
    """
    from tools.lab.report import write_study_report

    loaded = read_study(study, override or []).with_outcome(metric, last)
    cells = study_cells(loaded)
    assert loaded.folder is not None
    folder = loaded.folder / outcome_folder(metric, last, override or [])
    folder.mkdir(parents=True, exist_ok=True)
    print(write_study_report(loaded, cells, out or folder / "report.html"))


def mismatch(
    target: Annotated[str, typer.Argument(help="a run's folder, a name under conf/, or a YAML file")],
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts to sample from")] = 16,
    completions: Annotated[int, typer.Option(min=1, help="completions of each prompt")] = 4,
) -> None:
    """Start learner and engine as a run does, and say why their log-probs differ. Status 1 if more than rounding does.

    For a run's folder it uses the run's configuration and newest checkpoint. It trains nothing.
    """
    from tools.lab.mismatch.diagnose import diagnose, find_target

    chosen = find_target(target, overrides or [])
    if asyncio.run(diagnose(chosen, num_prompts=prompts, num_completions=completions)):
        raise typer.Exit(1)


def _checked(path: Path, more: Sequence[str]) -> tuple[Study, list[Cell]]:
    """Returns the study and its cells; each of them could start on this machine."""
    from launcher.preflight.checks import preflight

    study = read_study(path, more)
    cells = study_cells(study)
    arms = {cell.arm: cell for cell in reversed(cells)}  # a seed changes nothing here
    lines = [f"{arm}: {text}" for arm, cell in arms.items() for text in preflight(cell.config).texts("problem")]
    if lines:
        raise ConfigError("\n".join(lines))
    return study, cells
