"""Convert a megatron ``torch_dist`` checkpoint, saved in any layout, to Hugging Face safetensors.

    python tools/convert/megatron_to_hf.py MEGATRON_DIR HF_DIR [--config HF_DIR] [--dtype bfloat16] [--shard-gb 2]

`rl-megatron convert` in one direction: it refuses a Hugging Face folder. For the learner/ folder of a run's checkpoint
give ``--config``: a folder with the model's config.json and tokenizer. Streams, and continues after a kill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError
from rl_megatron.weights.checkpoints.kind import is_megatron
from tools.convert import conversion
from tools.convert.options import ConfigFolder, FileSize, NewDtype, OnePart, OwnFamily


def main(
    megatron_dir: Annotated[Path, typer.Argument(help="torch_dist checkpoint to read", show_default=False)],
    hf_dir: Annotated[Path, typer.Argument(help="folder to make; must not exist", show_default=False)],
    config: ConfigFolder = None,
    dtype: NewDtype = None,
    shard_gb: FileSize = None,
    family: OwnFamily = None,
    part: OnePart = None,
) -> None:
    """Convert a megatron torch_dist checkpoint to Hugging Face safetensors."""

    def work() -> None:
        if megatron_dir.is_dir() and not is_megatron(conversion.found(megatron_dir)):
            raise ConfigError(f"{megatron_dir} is a Hugging Face folder; hf_to_megatron.py goes the other way")
        conversion.run(megatron_dir, hf_dir, dtype=dtype, shard_gb=shard_gb, config=config, family=family, part=part)

    conversion.say(work)


if __name__ == "__main__":
    typer.run(main)
