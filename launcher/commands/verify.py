"""``rl-megatron verify``: checks a checkpoint, alone or against another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tools.convert.options import OwnFamily


def verify(
    folder: Annotated[Path, typer.Argument(help="checkpoint of either kind", show_default=False)],
    against: Annotated[Path | None, typer.Option(help="checkpoint of either kind to compare with")] = None,
    config: Annotated[Path | None, typer.Option(help="folder with config.json, if the checkpoint has none")] = None,
    family: OwnFamily = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="compare the learner's forward with transformers', in float32 on the CPU")
    ] = False,
    layers: Annotated[str, typer.Option(help="with --logprobs: the learner's layers, as in learner.layers")] = "auto",
    texts: Annotated[int, typer.Option(min=1, help="with --logprobs: number of texts of 64 tokens")] = 8,
    tolerance: Annotated[float, typer.Option(min=0, help="with --logprobs: largest difference, nats")] = 1e-3,
) -> None:
    """Check a checkpoint, alone or against another, to the bit; status 1 if anything is wrong.

    With --logprobs, compare the learner's log-probs with transformers', of it or of --against, a Hugging Face folder.
    """
    if logprobs:
        from launcher.programs.logprobs import compare_logprobs
        from tools.convert import conversion

        cores = len(os.sched_getaffinity(0))
        right = compare_logprobs(
            conversion.found(folder),
            against=None if against is None else conversion.found(against),
            config=config,
            family=family,
            layers=layers,
            num_texts=texts,
            tolerance=tolerance,
            threads=cores,
        )
    else:
        from tools.convert import verify_checkpoint

        right = verify_checkpoint.run(folder, against=against, config=config, family=family)
    if not right:
        raise typer.Exit(1)
