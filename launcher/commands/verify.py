"""``rl-megatron verify``: what is wrong with a checkpoint, alone or beside another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tools.options import OwnFamily


def verify(
    folder: Annotated[Path, typer.Argument(help="checkpoint of either kind", show_default=False)],
    against: Annotated[Path | None, typer.Option(help="checkpoint of either kind to compare with")] = None,
    config: Annotated[Path | None, typer.Option(help="folder with config.json, where the checkpoint has none")] = None,
    family: OwnFamily = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="compare the learner's forward with transformers', in float32 on the CPU")
    ] = False,
    layers: Annotated[str, typer.Option(help="with --logprobs: as learner.layers")] = "auto",
    texts: Annotated[int, typer.Option(min=1, help="with --logprobs: how many, of 64 tokens")] = 8,
    tolerance: Annotated[float, typer.Option(min=0, help="with --logprobs: largest difference, nats")] = 1e-3,
) -> None:
    """Say what is wrong with a checkpoint, alone or against another, to the bit; status 1 where something is.

    With --logprobs, whether it computes what transformers computes of it, or of --against, a Hugging Face folder.
    """
    if logprobs:
        from launcher.programs.logprobs import compare_logprobs
        from tools import conversion

        for path in filter(None, (folder, against)):
            conversion.must_be_there(path)
        cores = len(os.sched_getaffinity(0))
        right = compare_logprobs(
            folder,
            against=against,
            config=config,
            family=family,
            layers=layers,
            num_texts=texts,
            tolerance=tolerance,
            threads=cores,
        )
    else:
        from tools import verify_checkpoint

        right = verify_checkpoint.run(folder, against=against, config=config, family=family)
    if not right:
        raise typer.Exit(1)
