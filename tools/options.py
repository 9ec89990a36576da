"""Options that several tools take."""

from __future__ import annotations

from typing import Annotated

import typer

OwnFamily = Annotated[
    str | None,
    typer.Option("--family", help="a Family of your own, package.module:name, as learner.model; its code is run"),
]

OnePart = Annotated[
    str | None,
    typer.Option(
        "--part",
        help="K/N: write only this share of the files; under srun, rl-megatron takes its task's",
    ),
]
