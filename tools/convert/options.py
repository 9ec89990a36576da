"""Options that several tools and commands take."""

from __future__ import annotations

from pathlib import Path
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

NewDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32, bfloat16, float16, or to HF float8_e4m3fn in blocks; as stored when not given"
    ),
]

FileSize = Annotated[float | None, typer.Option("--shard-gb", help="size of a file [default: 1 to megatron, 2 to HF]")]

ConfigFolder = Annotated[
    Path | None, typer.Option("--config", help="folder with config.json, where the checkpoint has none")
]
