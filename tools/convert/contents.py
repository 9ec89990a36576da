"""Prints the contents of a checkpoint's folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_megatron.errors import CheckpointError
from rl_megatron.files import parse
from rl_megatron.training.checkpoints import latest
from rl_megatron.weights.checkpoints.contents import Contents, contents


def show(folder: Path) -> None:
    """Print the contents of a checkpoint of either kind, of one of a run's, or of the newest in a run's folder.

    Raises RLMegatronError.
    """
    place, step = _checkpoint(folder)
    found = contents(place)
    console = Console(markup=False)
    console.print(f"{place}: {found.kind}{step}", soft_wrap=True, highlight=False)
    for what, value in found.facts:
        console.print(f"  {what}: {value}", soft_wrap=True, highlight=False)
    console.print(_table(found))


def _checkpoint(folder: Path) -> tuple[Path, str]:
    """The folder of the shards, and a text with their step."""
    place = latest(folder / "checkpoints") or folder
    state = place / "trainer.json"
    if not state.is_file():
        return place, ""
    try:
        told = parse(state.read_text())
        warm, step = told.get("warm_start_step"), told["step"]
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{state}: not readable ({error})") from error
    return place / "learner", f", of step {step}" if warm is None else f", of step {warm} of the warm start"


def _table(found: Contents) -> Table:
    table = Table("part", "dtype", "tensors", "parameters")
    for column in table.columns[2:]:
        column.justify = "right"
    for part in found.parts:
        table.add_row(part.what, part.dtype, f"{part.tensors:,}", f"{part.parameters:,}")
    return table
