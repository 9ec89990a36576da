"""``rl-megatron experiment`` runs studies of many cells, and ``doctor mismatch`` finds why log-probs differ."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError
from tools.lab.states import STARTABLE, CellState, counts, drift_of, find_states, states_table
from tools.lab.study import Cell, Study, cells_of, outcome_folder, read_study

app = typer.Typer(add_completion=False, no_args_is_help=True)
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="the study's file", show_default=False)]
More = Annotated[
    list[str] | None,
    typer.Option("--override", metavar="KEY=VALUE", help="one more override of all cells, which are others then"),
]


@app.callback()
def experiment() -> None:
    """Run a study: a grid of runs with seeds, from one file."""


@app.command()
def run(
    study: StudyFile,
    override: More = None,
    retry: Annotated[bool, typer.Option("--retry", help="start cells again that have failed")] = False,
    check: Annotated[bool, typer.Option("--check", help="check all cells, and start none")] = False,
) -> None:
    """Run the cells that are not done, side by side, each as a run of its own that can be resumed.

    Ctrl-C has all of them save and ends with status 0; started again, the study goes on. The status is 1 if a cell has
    failed. Cells that are in Slurm's queue are left to it.
    """
    loaded, cells = _checked(study, override or [])
    from tools.lab.run import cells_at_once, queue_of, run_cells

    if check:
        print(f"{len(cells)} cells, {cells_at_once(loaded, cells)} at once; nothing is wrong with any")
        return
    found = asyncio.run(run_cells(loaded, cells, retry=retry, queue=lambda: queue_of(cells)))
    print(states_table(found))
    if any(each.state is CellState.FAILED for each in found):
        raise typer.Exit(1)


@app.command()
def submit(
    study: StudyFile,
    override: More = None,
    retry: Annotated[bool, typer.Option("--retry", help="send cells again that have failed")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check all, print the scripts, and send nothing")] = False,
) -> None:
    """Send the cells that are not done to Slurm: an array for cells of alike nodes, budget.cells_at_once at a time.

    A cell comes back by itself after a time limit, preemption or a node's loss. Sent again, the study takes what is
    neither done nor in Slurm's queue; cells that have failed are named, and taken with --retry.
    """
    from launcher.hosts.slurm.calls import parse_script
    from tools.lab.run import alone, arrays_of, checked_for_slurm, queue_of, send

    loaded = read_study(study, override or [])
    cells = cells_of(loaded)
    notes = checked_for_slurm(cells)
    with alone(loaded):
        found = find_states(loaded, cells, queue_of(cells))
        takes = {*STARTABLE, *([CellState.FAILED] if retry else [])}
        queued = sum(each.state in {CellState.RUNNING, CellState.PENDING} for each in found)
        wanted = arrays_of(loaded, [each.cell for each in found if each.state in takes], queued=queued)
        print(f"{loaded.folder}: {counts(found)}", *notes, sep="\n")
        if wanted and queued and (most := loaded.budget.cells_at_once) is not None:
            print(f"{queued} cells are in the queue: of budget.cells_at_once={most} these get the rest, at least 1")
        for each in found:
            if each.state is CellState.PENDING and "JobHeldUser" in each.reason:
                print(f"held: {each.cell.name}: {each.reason}; after a submit that was ended, scancel it and repeat")
        for each in found:
            if each.state is CellState.FAILED and not retry:
                print(f"not sent without --retry: {each.cell.name}: {each.reason}")
        for array in wanted:
            parse_script(array.script)
            print(array.script if dry_run else array.describe())
        if dry_run:
            print(f"nothing was sent; without --dry-run {sum(len(array.cells) for array in wanted)} cells would be")
            return
        for job, script in send(loaded, wanted):
            print(f"array {job}: {script}; scancel {job} ends it")
    print(f"rl-megatron experiment status {shlex.quote(str(study))} shows the cells" if wanted else "nothing was sent")


@app.command()
def status(study: StudyFile, override: More = None) -> None:
    """Print each cell: done, running, pending in Slurm's queue, failed with the reason, lost, or waiting."""
    from tools.lab.run import queue_of

    loaded = read_study(study, override or [])
    cells = cells_of(loaded)
    found = find_states(loaded, cells, queue_of(cells))
    print(states_table(found))
    for each in found:
        if each.state in {CellState.DONE, CellState.SPENT} and (line := drift_of(each.cell)):
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
    """Write the page over all runs, with differences and fits; beside it JSON and CSV.

    With --metric, --last or --override it is written into a folder named by them, so that a study's outcomes do not
    replace one another.
    """
    from tools.lab.report import write_study_report
    from tools.lab.run import queue_of

    loaded = read_study(study, override or []).with_outcome(metric, last)
    cells = cells_of(loaded)
    assert loaded.folder is not None
    folder = loaded.folder / outcome_folder(metric, last, override or [])
    try:
        queue = queue_of(cells)
    except ConfigError as error:  # the folders may have been copied from the cluster
        print(f"note: Slurm was not asked: {error}")
        queue = None
    folder.mkdir(parents=True, exist_ok=True)
    print(write_study_report(loaded, cells, out or folder / "report.html", queue))


def mismatch(
    target: Annotated[str, typer.Argument(help="a run's folder, a name under conf/, or a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts to sample from")] = 16,
    completions: Annotated[int, typer.Option(min=1, help="completions of each prompt")] = 4,
) -> None:
    """Start learner and engine as a run does, and say why their log-probs differ. Status 1 if more than rounding does.

    For a run's folder it uses the run's configuration and newest checkpoint. It trains nothing.
    """
    from tools.lab.mismatch.diagnose import diagnose, target_of

    chosen = target_of(target, overrides or [])
    if asyncio.run(diagnose(chosen, num_prompts=prompts, num_completions=completions)):
        raise typer.Exit(1)


def _checked(path: Path, more: Sequence[str]) -> tuple[Study, list[Cell]]:
    """The study and its cells, each of which could start on this machine."""
    from launcher.preflight.checks import preflight

    study = read_study(path, more)
    cells = cells_of(study)
    arms = {cell.arm: cell for cell in reversed(cells)}  # a seed changes nothing here
    lines = [f"{arm}: {text}" for arm, cell in arms.items() for text in preflight(cell.config).texts("problem")]
    if lines:
        raise ConfigError("\n".join(lines))
    return study, cells
