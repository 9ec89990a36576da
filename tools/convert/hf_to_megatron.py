"""Convert Hugging Face safetensors to a megatron ``torch_dist`` checkpoint that loads at any TP, PP, EP and ETP.

    python tools/convert/hf_to_megatron.py HF_DIR MEGATRON_DIR [--dtype bfloat16] [--shard-gb 1]

`rl-megatron convert` in one direction: it refuses a checkpoint that is megatron's already. Streams, and continues after
a kill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError
from rl_megatron.weights.checkpoints.kind import is_megatron
from tools.convert import conversion
from tools.convert.options import FileSize, NewDtype, OnePart, OwnFamily


def main(
    hf_dir: Annotated[Path, typer.Argument(help="Hugging Face folder to read", show_default=False)],
    megatron_dir: Annotated[Path, typer.Argument(help="folder to make; must not exist", show_default=False)],
    dtype: NewDtype = None,
    shard_gb: FileSize = None,
    family: OwnFamily = None,
    part: OnePart = None,
) -> None:
    """Convert Hugging Face safetensors to a megatron torch_dist checkpoint."""

    def work() -> None:
        if hf_dir.is_dir() and is_megatron(conversion.found(hf_dir)):
            raise ConfigError(f"{hf_dir} is a megatron checkpoint already; megatron_to_hf.py goes the other way")
        conversion.run(hf_dir, megatron_dir, dtype=dtype, shard_gb=shard_gb, family=family, part=part)

    conversion.say(work)


if __name__ == "__main__":
    typer.run(main)
