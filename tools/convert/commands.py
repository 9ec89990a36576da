"""``rl-megatron convert``: converts checkpoints of both kinds, verifies them, and shows what they hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError

OwnFamily = Annotated[
    str | None,
    typer.Option("--family", help="a Family of your own, package.module:name, as learner.model; its code is run"),
]
_Source = Annotated[
    str,
    typer.Argument(
        help="Hugging Face folder, megatron torch_dist, or where Megatron-LM saved; with --inspect also a run's "
        "folder, and with --layout a model, as qwen3-30b-a3b",
        show_default=False,
    ),
]
_Upcycle = Annotated[
    str | None,
    typer.Option(
        help="make a mixture of experts of a dense HF folder: experts=8[,topk=2,granularity=1,noise=0,seed=0]"
    ),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="say what would be written and if it fits the disk; write nothing")
]
_Logprobs = Annotated[
    bool,
    typer.Option(
        "--logprobs",
        help="with --verify: compare the learner's log-probs with transformers', of it or of --against, a Hugging "
        "Face folder, in float32 on the CPU",
    ),
]
_READ: Mapping[str, frozenset[str]] = {
    "a conversion": frozenset({"out", "config", "family", "dtype", "shard_gb", "upcycle", "merge", "part", "dry_run"}),
    "--verify": frozenset({"config", "family", "against", "logprobs"}),
    "--verify --logprobs": frozenset({"config", "family", "against", "logprobs", "layers", "texts", "tolerance"}),
    "--inspect": frozenset({"layout"}),
    "--inspect --layout": frozenset({"layout", "family", "rank"}),
}
"""The options that each form of the command reads, in the order in which errors name the forms."""


def convert(
    ctx: typer.Context,
    source: _Source,
    out: Annotated[
        Path | None, typer.Argument(help="new folder for the checkpoint of the other kind", show_default=False)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="folder with config.json, where the checkpoint has none")] = None,
    family: OwnFamily = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 (or fp32, bf16, fp16), or to HF float8_e4m3fn in blocks; as stored when "
            "not given"
        ),
    ] = None,
    shard_gb: Annotated[float | None, typer.Option(help="size of a file [default: 1 to megatron, 2 to HF]")] = None,
    upcycle: _Upcycle = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="write the model with the adapters of a run's checkpoint merged into it")
    ] = False,
    part: Annotated[
        str | None, typer.Option(help="K/N: write only this share of the files; under srun that of the task")
    ] = None,
    dry_run: _DryRun = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="check SOURCE to the bit; status 1 if anything is wrong")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="with --verify: checkpoint of either kind to compare with")
    ] = None,
    logprobs: _Logprobs = False,
    layers: Annotated[str, typer.Option(help="with --logprobs: the learner's layers, as in learner.layers")] = "auto",
    texts: Annotated[int, typer.Option(min=1, help="with --logprobs: number of texts of 64 tokens")] = 8,
    tolerance: Annotated[float, typer.Option(min=0, help="with --logprobs: largest difference, nats")] = 1e-3,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="show what SOURCE holds: kind, model, tensors, dtypes, sizes, step")
    ] = False,
    layout: Annotated[
        str | None, typer.Option(help="with --inspect: as megatron,tp=2,pp=2,ep=2; show what each rank would hold")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="with --layout: list this rank's parameters")] = None,
) -> None:
    """Convert a checkpoint to the other kind, streaming; or --verify it, or --inspect what it holds.

    If a conversion was killed, the same command continues it. A checkpoint of adapters (learner.lora) becomes a folder
    of peft, or with --merge a Hugging Face folder; --config is the model that they were trained with.

    With --upcycle OUT is a Hugging Face folder too: each expert begins as the dense layer's MLP (docs/checkpoints.md).

    Started by srun as several tasks, on one node or many, each writes its share of the files.
    """
    if verify and inspect:
        raise ConfigError("--verify and --inspect are two commands; give one of them")
    form = "--verify" + " --logprobs" * logprobs if verify else "a conversion"
    form = "--inspect" + " --layout" * (layout is not None) if inspect else form
    _refuse(ctx, form)
    folder = Path(source)
    if inspect:
        from tools.convert import inspection

        if layout is None:
            inspection.show(folder)
        else:
            inspection.show_layout(source, layout, rank=rank, family=family)
    elif logprobs:
        from tools.convert.verify import compare_logprobs

        equal = compare_logprobs(
            folder,
            against=against,
            config=config,
            family=family,
            layers=layers,
            num_texts=texts,
            tolerance=tolerance,
            threads=len(os.sched_getaffinity(0)),
        )
        _exit(equal)
    elif verify:
        from tools.convert.verify import print_problems

        _exit(print_problems(folder, against=against, config=config, family=family))
    elif out is None:
        raise ConfigError("give OUT, a new folder for the checkpoint of the other kind, or --verify, or --inspect")
    else:
        from tools.convert import conversion

        conversion.run(
            folder,
            out,
            dtype=dtype,
            shard_gb=shard_gb,
            config=config,
            family=family,
            upcycle=upcycle,
            merge=merge,
            part=part or part_of_step(os.environ),
            dry_run=dry_run,
        )


def _exit(right: bool) -> None:
    if not right:
        raise typer.Exit(1)


def _refuse(ctx: typer.Context, form: str) -> None:
    """Raises ConfigError for an option that this form of the command does not read."""
    for param in ctx.command.params:
        name = param.name or ""
        forms = [one for one, names in _READ.items() if name in names]
        source = ctx.get_parameter_source(name)
        if forms and form not in forms and source is not None and source.name == "COMMANDLINE":
            given = param.opts[0] if name != "out" else "OUT"
            raise ConfigError(f"{given} goes with {' or '.join(forms)}, and {form} does not read it; leave it out")


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
