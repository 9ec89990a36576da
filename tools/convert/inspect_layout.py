"""Show which rank of a layout holds which parameters, as text and as a picture.

    python tools/convert/inspect_layout.py MODEL megatron,tp=2,pp=2,ep=2,dp=2 [--rank 3] [--svg layout.svg]

MODEL is a folder with a config.json, or a name such as qwen3-235b-a22b; no weights are read.
"""

from __future__ import annotations

from html import escape
from math import prod
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rl_megatron.errors import ConfigError
from rl_megatron.files import write_atomically
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, coordinates, degree
from rl_megatron.weights.layouts.parsing import model_shape, parse_layout
from tools.convert import conversion
from tools.convert.options import OwnFamily

_CELL, _HEIGHT, _LEFT, _TOP = 64, 26, 330, 74
_STAGE_COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#97bbf5", "#9c6b4e")


def main(
    model: Annotated[str, typer.Argument(help="folder with config.json, or a known name", show_default=False)],
    layout: Annotated[str, typer.Argument(help="as megatron,tp=2,pp=2,ep=2", show_default=False)],
    rank: Annotated[int | None, typer.Option(help="list this rank's parameters with their shapes")] = None,
    svg: Annotated[Path | None, typer.Option(help="write the picture here")] = None,
    family: OwnFamily = None,
) -> None:
    """Print who holds what in a layout."""

    conversion.say(lambda: run(model, layout, rank=rank, svg=svg, family=family))


def run(
    model: str, layout: str, *, rank: int | None = None, svg: Path | None = None, family: str | None = None
) -> None:
    """Print the layout, and write the picture to ``svg``. Raises RLMegatronError."""
    made = parse_layout("layout", layout, model_shape(model, family))
    if rank is not None and rank >= made.dims.world_size:
        raise ConfigError(f"--rank {rank}: the layout {layout} has {made.dims.world_size} ranks, from 0 on")
    console = Console(markup=False)
    console.print(parameters(made, rank) if rank is not None else ranks(made, f"{model}: {layout}"))
    if svg is not None:
        write_atomically(svg, picture(made, f"{model}: {layout}").encode())
        console.print(f"{svg}")


def ranks(layout: Layout, title: str) -> Table:
    """One line per rank: its place, layers, experts and how much it holds."""
    table = Table("rank", "tp", "pp", "ep", "etp", "layers", "experts", "parameters", "of all", title=title)
    whole = sum(prod(s) for s in Layout(table=layout.table, shape=layout.shape).local_shapes(0).values())
    for rank in range(layout.dims.world_size):
        at, held = coordinates(layout.dims, rank), sum(prod(s) for s in layout.local_shapes(rank).values())
        per = layout.shape.num_experts // layout.dims.ep
        experts = f"{at.ep * per}–{(at.ep + 1) * per - 1}" if per else "none"
        place = (rank, at.tp, at.pp, at.ep, at.etp, _layers(layout, at.pp), experts, f"{held:,}", f"{held / whole:.1%}")
        table.add_row(*map(str, place))
    return table


def parameters(layout: Layout, rank: int) -> Table:
    """Every parameter of one rank with its shape."""
    table = Table("parameter", "shape", title=f"rank {rank} of {layout.dims.world_size}")
    for name, shape in layout.local_shapes(rank).items():
        table.add_row(name, " × ".join(map(str, shape)))
    return table


def picture(layout: Layout, title: str) -> str:
    """An SVG with a column per rank and a line per row of the table; colour is the stage, text the share held."""
    rows, world = layout.rows(), layout.dims.world_size
    width, height = _LEFT + world * _CELL + 12, _TOP + len(rows) * _HEIGHT + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for rank in range(world):
        x, at = _LEFT + rank * _CELL, coordinates(layout.dims, rank)
        parts.append(f'<text x="{x + _CELL / 2}" y="46" text-anchor="middle">rank {rank}</text>')
        parts.append(
            f'<text x="{x + _CELL / 2}" y="62" text-anchor="middle" fill="#666">{_layers(layout, at.pp)}</text>'
        )
    for i, spec in enumerate(rows):
        y = _TOP + i * _HEIGHT
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(_short(spec))}</text>')
        for rank in range(world):
            text = _share(layout, spec, rank)
            if text is None:
                continue
            x, at = _LEFT + rank * _CELL, coordinates(layout.dims, rank)
            colour = _STAGE_COLOURS[at.pp % len(_STAGE_COLOURS)]
            box = f'x="{x + 2}" y="{y + 2}" width="{_CELL - 4}" height="{_HEIGHT - 4}" rx="3"'
            parts.append(f'<rect {box} fill="{colour}" fill-opacity="0.35" stroke="{colour}"/>')
            parts.append(f'<text x="{x + _CELL / 2}" y="{y + 17}" text-anchor="middle">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _share(layout: Layout, spec: ParamSpec, rank: int) -> str | None:
    """What a rank holds of a row: which part of each tensor, of which experts; None if nothing."""
    at, d = coordinates(layout.dims, rank), layout.dims
    if all(at.pp not in stages for stages in layout.layer_stages(spec).values()):
        return None
    chunks = degree(d, spec.axis)
    part = "all" if chunks == 1 else f"{at.on(spec.axis) + 1}/{chunks}"
    return f"e{at.ep + 1}/{d.ep} {part}" if "{expert}" in spec.name else part


def _layers(layout: Layout, stage: int) -> str:
    """``0–11``, or several such ranges under VPP."""
    rows = [spec for spec in layout.rows() if "{layer}" in spec.name]  # no row may have all layers
    held = sorted({n for spec in rows for n, stages in layout.layer_stages(spec).items() if stage in stages})
    starts = [layer for layer in held if layer - 1 not in held]
    ends = [layer for layer in held if layer + 1 not in held]
    return ", ".join(f"{a}–{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


def _short(spec: ParamSpec) -> str:
    return spec.name.replace("decoder.layers.{layer}.", "").replace("{expert}", "")


if __name__ == "__main__":
    typer.run(main)
