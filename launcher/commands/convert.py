"""``rl-megatron convert``: a checkpoint of one kind as one of the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError
from tools.convert.options import ConfigFolder, FileSize, NewDtype, OnePart, OwnFamily


def convert(
    source: Annotated[
        Path,
        typer.Argument(help="Hugging Face folder, megatron torch_dist, or where Megatron-LM saved", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(help="new folder for the checkpoint of the other kind", show_default=False)],
    config: ConfigFolder = None,
    dtype: NewDtype = None,
    shard_gb: FileSize = None,
    family: OwnFamily = None,
    upcycle: Annotated[
        str | None,
        typer.Option(
            help="make a mixture of experts of a dense HF folder: experts=8[,topk=2,granularity=1,noise=0,seed=0]"
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="write the model with the adapters of a run's checkpoint merged into it")
    ] = False,
    part: OnePart = None,
) -> None:
    """Convert a checkpoint to the other kind, streaming. If it was killed, the same command continues it.

    A checkpoint of adapters (learner.lora) becomes a folder of peft, or with --merge a Hugging Face folder; --config is
    the model that they were trained beside.

    With --upcycle OUT is a Hugging Face folder too: each expert begins as the dense layer's MLP (docs/weights.md).

    Started by srun as several tasks, on one node or many, each writes its share of the files.
    """
    from tools.convert import conversion

    conversion.run(
        source,
        out,
        dtype=dtype,
        shard_gb=shard_gb,
        config=config,
        family=family,
        upcycle=upcycle,
        merge=merge,
        part=part or part_of_step(os.environ),
    )


def part_of_step(environment: Mapping[str, str]) -> str | None:
    """This task's part of the work, as ``K/N``, if srun started several; a batch script itself is one process.

    Raises ConfigError in a step with a terminal: only one of its tasks may have a shell.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and any(name.startswith("SLURM_PTY_") for name in environment):
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={tasks} in a step of srun --pty: a shell has one task, which would write a part "
            f"alone; give --part 1/1 to write all here, or start the command itself by srun --ntasks={tasks}"
        )
    return None if tasks == "1" else f"{int(environment['SLURM_PROCID']) + 1}/{tasks}"
