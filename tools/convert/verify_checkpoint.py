"""Say what is wrong with a Hugging Face or megatron ``torch_dist`` checkpoint; exit status 1 if anything is wrong.

    python tools/convert/verify_checkpoint.py FOLDER [--against OTHER] [--config HF_DIR]

Checks that every tensor of the model is there, with its shape, in complete files (checksums, if the format has them;
of a run's checkpoints/step_N/learner those of all files of step_N), and that every value is a number; with
``--against``, that another checkpoint of either kind is equal to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.digests import Digest
from rl_megatron.errors import CheckpointError
from rl_megatron.training import checkpoints
from rl_megatron.weights.checkpoints.kind import is_megatron
from rl_megatron.weights.checkpoints.verify import verify
from tools.convert import conversion
from tools.convert.options import OwnFamily

MAX_LINES = 50


def main(
    folder: Annotated[Path, typer.Argument(help="checkpoint to look at", show_default=False)],
    against: Annotated[Path | None, typer.Option(help="checkpoint of either kind to compare with")] = None,
    config: Annotated[Path | None, typer.Option(help="folder with config.json, where the checkpoint has none")] = None,
    family: OwnFamily = None,
) -> None:
    """Verify a checkpoint, alone or against another."""

    def work() -> None:
        if not run(folder, against=against, config=config, family=family):
            sys.exit(1)

    conversion.say(work)


def run(folder: Path, *, against: Path | None = None, config: Path | None = None, family: str | None = None) -> bool:
    """Print what is wrong; return whether nothing is. Raises RLMegatronError if it cannot be read to its end."""
    folder = conversion.found(folder)
    against = None if against is None else conversion.found(against)
    problems, written = _of_run(folder.resolve()) if is_megatron(folder) else ([], None)
    with conversion.display(folder.name) as progress:
        problems += verify(folder, against=against, config=config, family=family, written=written, on_progress=progress)
    for line in problems[:MAX_LINES]:
        print(line)
    if len(problems) > MAX_LINES:
        print(f"and {len(problems) - MAX_LINES} more")
    print(f"{folder}: {len(problems) or 'no'} problems" + (f", compared with {against}" if against else ""))
    return not problems


def _of_run(shards: Path) -> tuple[list[str], Mapping[str, Digest] | None]:
    """What keeps the checkpoint of a run, where ``shards`` is part of one, from being resumed, or else its digests."""
    try:
        return [], checkpoints.read(shards.parent).files if checkpoints.files_of(shards) else None
    except CheckpointError as error:
        return [str(error)], None


if __name__ == "__main__":
    typer.run(main)
