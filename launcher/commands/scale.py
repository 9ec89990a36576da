"""``rl-megatron scale``: predicts memory and time of layouts on GPUs; compares predictions with published runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rl_megatron.errors import ConfigError
from rl_megatron.scaling.constants import LEFT_OUT
from rl_megatron.scaling.points import Prediction, interval, ordered_pairs, predictions, read_points


def scale(
    points: Annotated[
        Path | None,
        typer.Option(
            help="a JSON file of published runs: print what is predicted and was measured of each (docs/scaling.md)"
        ),
    ] = None,
) -> None:
    """Predict memory and time of a learner's layouts, in a second and without torch."""
    if points is None:
        raise ConfigError("give --points FILE.json, as in rl-megatron scale --points bench/published_runs.json")
    refused: list[str] = []
    show_points(list(predictions(read_points(points), refused=refused)))
    for line in refused:
        print(f"not predicted: {line}")


def show_points(found: Sequence[Prediction]) -> None:
    """Print each point's prediction, and how far they are off in all beside the bars that they are held to."""
    console = Console()
    for kind, unit in (("throughput", "tokens/s a GPU"), ("memory", "GB on the fullest GPU")):
        rows = [point for point in found if point.kind == kind]
        if not rows:
            continue
        table = Table(kind, "predicted", "measured", "error", title=f"{kind}: {unit}")
        for column in table.columns[1:]:
            column.justify = "right"
        for point in sorted(rows, key=lambda point: (point.group, point.release)):
            numbers = (
                f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in (point.predicted, point.measured)
            )
            table.add_row(point.name, *numbers, f"{point.error:+.1%}")
        console.print(table)
    for line in _against_bars(found):
        console.print(line, soft_wrap=True)


def _against_bars(found: Sequence[Prediction]) -> list[str]:
    """Lines of the errors in all, each beside its bar."""
    lines = []
    sizes = [abs(point.error) for point in found if point.kind == "throughput"]
    if sizes:
        lines.append(
            f"throughput, {len(sizes)} points: mean error {sum(sizes) / len(sizes):.1%} (bar 12 %), median "
            f"{median(sizes):.1%}, worst {max(sizes):.0%}"
        )
        lines.append(
            f"throughput of models and GPUs that a fit had not seen: mean error {LEFT_OUT:.0%} (bar 15 %), stored when "
            "the constants were fitted (bench/step_time.py)"
        )
    right, total = ordered_pairs(found)
    if total:
        low, high = interval(right, total)
        lines.append(
            f"order of {total} pairs of one model, GPU and release that lie 15 % apart: {right / total:.0%} right (bar "
            f"80 %), 95 % interval {low:.0%} to {high:.0%}"
        )
    for sparse, name, bar in ((True, "mixtures of experts", 8), (False, "dense models", 12)):
        sizes = [abs(point.error) for point in found if point.kind == "memory" and point.sparse == sparse]
        if sizes:
            lines.append(f"memory of {name}, {len(sizes)} points: worst error {max(sizes):.1%} (bar {bar} %)")
    return lines
