"""The console command ``rl-megatron`` (also ``python -m launcher``); its entry is launcher/entry.py."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands import doctor as doctor_room
from launcher.commands.plan import show_memory, show_plan
from launcher.processes import limits
from launcher.runs.name import choose
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError, RLMegatronError
from tools.options import OwnFamily

_NAMES = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_NAMES)
doctor_app = typer.Typer()
app.add_typer(doctor_app, name="doctor")


def _version(asked: bool) -> None:
    if asked:
        print(f"rl-megatron {importlib.metadata.version('rl-megatron')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Reinforcement learning of language models on megatron-core. Each command has --help; docs/ has the rest."""
    sys.path.append(str(Path.cwd()))  # where the user's own rewards, layers and families may be


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    config: Annotated[str, typer.Option(help="a name under conf/, or a YAML file")] = "tiny_cpu",
    resume: Annotated[bool, typer.Option("--resume", help="continue the run from its last checkpoint")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="say what is wrong with the configuration here, and start nothing")
    ] = False,
) -> None:
    """Train a policy by reinforcement; everything goes to runs/<name>/.

    Ctrl-C (or SIGTERM) finishes the step in hand, saves and exits with status 0; a second Ctrl-C exits at once, 130.
    """
    from launcher.preflight.checks import preflight
    from rl_megatron.rewards.registry import resolve_reward

    loaded = load_config(config, overrides or [])
    named = choose(loaded, Path(config).stem, resume=resume)
    findings = preflight(named)
    findings.raise_problems()
    if check:
        print(findings.describe())
        return
    reward = resolve_reward(named.reward)
    for line in findings.notes():
        print(line, flush=True)
    print(f"rl-megatron: run {named.run.dir / str(named.run.name)}", flush=True)  # the imports below take seconds
    try:
        from launcher.programs import train as room

        asyncio.run(room.train(named, reward, resume=resume))
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint stands, and --resume continues from it", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def submit(
    config: Annotated[str, typer.Argument(help="a name under conf/, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="write the script and check it, but send nothing")] = False,
) -> None:
    """Train on a Slurm cluster: check all that can be seen here, write the job's script to runs/<name>/ and send it."""
    from launcher.programs import submit as room

    loaded = load_config(config, overrides or [])
    named = choose(loaded, Path(config).stem, resume=False, taken=room.taken)
    prepared = room.prepare(named)
    print(prepared.checked.describe(), prepared.findings.describe(), sep="\n", flush=True)
    room.verify_script(prepared, cluster=not dry_run)
    sends = f"nothing was sent; this sends it: sbatch {prepared.script}"
    print(sends if dry_run else f"job {room.send(prepared)}: {prepared.folder}")


@app.command()
def status(run: Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]) -> None:
    """Say what a run, or the job of one, does: its state and its last step."""
    from launcher.hosts.slurm import jobs

    print(jobs.describe(run))


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="the run's folder", show_default=False)],
    which: Annotated[str, typer.Argument(help="job, controller, step, or rank-<number>")] = "controller",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="show what is added, until Ctrl-C")] = False,
) -> None:
    """Show what a part of the run's job printed since its last restart."""
    from launcher.hosts.slurm import jobs

    sys.stdout.flush()
    os.execvp("tail", ["tail", *(["-F"] if follow else []), "-n", "+1", str(jobs.log_file(run, which))])


@app.command()
def attach(run: Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]) -> None:
    """Follow a running job, over its restarts, until its end; Ctrl-C leaves it running. Status 1 where it failed."""
    from launcher.hosts.slurm import attach as room

    try:
        if not room.follow(run, lambda line: print(line, flush=True)):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        print("detached; the job goes on", file=sys.stderr)


@app.command()
def cancel(run: Annotated[Path, typer.Argument(help="the run's folder", show_default=False)]) -> None:
    """End the job of a run for good; its last checkpoint stands."""
    from launcher.hosts.slurm import jobs

    print(f"job {jobs.cancel(run)} cancelled")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; several are compared", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="the HTML file [default: report.html in the first run]")] = None,
) -> None:
    """Write a self-contained report.html of one run, or comparing several."""
    from rl_megatron.observability.report import write_report

    print(write_report(runs, out or runs[0] / "report.html"))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face or megatron torch_dist folder", show_default=False)],
    out: Annotated[Path, typer.Argument(help="folder to make, of the other kind", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="folder with config.json, where source has none")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16, or to HF float8_e4m3fn in blocks; as stored when not given"),
    ] = None,
    shard_gb: Annotated[float | None, typer.Option(help="size of a file [default: 1 to megatron, 2 to HF]")] = None,
    family: OwnFamily = None,
) -> None:
    """Convert a checkpoint to the other kind, streaming; killed and given again, it goes on."""
    from tools import conversion

    conversion.run(source, out, dtype=dtype, shard_gb=shard_gb, config=config, family=family)


@app.command()
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
        from launcher.programs import logprobs as logprob_check
        from tools import conversion

        for path in filter(None, (folder, against)):
            conversion.must_be_there(path)
        cores = len(os.sched_getaffinity(0))
        right = logprob_check.compare_dumps(
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


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(help="a checkpoint of either kind, a run's folder, or with LAYOUT a model", show_default=False),
    ],
    layout: Annotated[str | None, typer.Argument(help="as megatron,tp=2,pp=2,ep=2: who would hold what")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="with LAYOUT: list this rank's parameters")] = None,
    svg: Annotated[Path | None, typer.Option(help="with LAYOUT: write a picture here")] = None,
    family: OwnFamily = None,
) -> None:
    """Say what a folder holds: kind, model, tensors, dtypes, sizes, step; or who holds what of a model in a layout."""
    if layout is not None:
        from tools import inspect_layout

        inspect_layout.run(target, layout, rank=rank, svg=svg, family=family)
        return
    if rank is not None or svg is not None or family is not None:
        raise ConfigError("--rank, --svg and --family are of a layout; give one, as in megatron,tp=2,pp=2,ep=2")
    from launcher.programs import contents
    from tools import conversion

    conversion.must_be_there(Path(target))
    contents.show(Path(target))


@app.command()
def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL LAYOUTS",
            help="a folder with a config.json or a name as kimi-k2, then src=megatron,tp=4,ep=8,dp=2 and dst=hf,dp=8 "
            "or dst=engine,tp=8 (experts cut by tp; spread with ep=8); with --config: section.key=value",
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="a name under conf/, or a YAML file: print what each GPU must hold instead")
    ] = None,
    nic: Annotated[float, typer.Option(min=0.001, help="a GPU's share of the network, GB/s each way")] = 50.0,
    nvlink: Annotated[float, typer.Option(min=0.001, help="a GPU's bandwidth inside its node, GB/s each way")] = 450.0,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs a node")] = 8,
    element_bytes: Annotated[int, typer.Option(min=1, help="bytes an element; 2 is bfloat16")] = 2,
    gpu_memory_gb: Annotated[float, typer.Option(min=0.001, help="of a GPU; a rank that needs more is named")] = 80.0,
    colocated: Annotated[bool, typer.Option("--colocated", help="rank r of dst lives in process r of src")] = False,
    family: OwnFamily = None,
) -> None:
    """Print what moving a model's weights between two layouts costs, beside gather-and-broadcast."""
    from rl_megatron.weights.plans.cost import Links

    if config is not None:
        if family is not None:
            raise ConfigError("--family is of a model and two layouts; with --config set learner.model instead")
        show_memory(config, arguments or [])
        return
    if not arguments:
        raise ConfigError("give a model and two layouts, as in kimi-k2 src=megatron,ep=8,dp=8 dst=hf, or --config NAME")
    model, *layouts = arguments
    links = Links(nic=nic * 1e9, nvlink=nvlink * 1e9, per_node=per_node)
    show_plan(
        model,
        layouts,
        family=family,
        element_bytes=element_bytes,
        links=links,
        colocated=colocated,
        gpu_memory_gb=gpu_memory_gb,
    )


@doctor_app.callback(invoke_without_command=True)
def doctor(context: typer.Context) -> None:
    """Say what this machine and this installation can run; or find the cause of a mismatch."""
    if context.invoked_subcommand is None:
        doctor_room.show()


@doctor_app.command()
def mismatch(
    target: Annotated[str, typer.Argument(help="a run's folder, a name under conf/, or a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="prompts that are sampled from")] = 16,
    completions: Annotated[int, typer.Option(min=1, help="completions of each")] = 4,
) -> None:
    """Start learner and engine as a run does, and say why their log-probs differ. Status 1 where more than rounding is.

    Of a run's folder its configuration and its newest checkpoint are taken; nothing is trained.
    """
    from launcher.programs import mismatch as room

    chosen = room.target_of(target, overrides or [])
    if asyncio.run(room.diagnose(chosen, num_prompts=prompts, num_completions=completions)):
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. An error that is the user's to read, or the system's, is printed without a traceback; status 1."""
    try:
        limits.raise_open_files()
        app(args=arguments, standalone_mode=True)
    except RLMegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (OSError, RuntimeError) as error:
        said = limits.refusal(error)
        if said is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
