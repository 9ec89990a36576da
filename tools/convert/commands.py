"""``rl-megatron convert``, ``verify`` and ``inspect``: checkpoints of both kinds."""

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
        from tools.convert import conversion
        from tools.convert.logprobs import compare_logprobs

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
    from tools.convert import contents, conversion

    contents.show(conversion.found(Path(target)))
