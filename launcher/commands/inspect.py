"""``rl-megatron inspect``: what a folder holds, or who would hold what of a model in a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError
from tools.convert.options import OwnFamily


def inspect(
    target: Annotated[
        str,
        typer.Argument(help="a checkpoint of either kind, a run's folder, or with LAYOUT a model", show_default=False),
    ],
    layout: Annotated[
        str | None, typer.Argument(help="as megatron,tp=2,pp=2,ep=2: show what each rank would hold")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="with LAYOUT: list this rank's parameters")] = None,
    svg: Annotated[Path | None, typer.Option(help="with LAYOUT: write a picture here")] = None,
    family: OwnFamily = None,
) -> None:
    """Show what a folder holds: kind, model, tensors, dtypes, sizes, step; or what each rank of a layout would hold."""
    if layout is not None:
        from tools.convert import inspect_layout

        inspect_layout.run(target, layout, rank=rank, svg=svg, family=family)
        return
    if rank is not None or svg is not None or family is not None:
        raise ConfigError("--rank, --svg and --family need a layout; give one, as in megatron,tp=2,pp=2,ep=2")
    from launcher.programs import contents
    from tools.convert import conversion

    contents.show(conversion.found(Path(target)))
