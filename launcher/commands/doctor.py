"""``rl-megatron doctor``: lists packages and devices, and what they allow a run to do."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from launcher.processes import limits
from launcher.servers.versions import describe_environments

_PACKAGES = (
    ("torch", "torch", "required"),
    ("megatron-core", "megatron", "required: the learner"),
    ("transformers", "transformers", "required: configs and tokenizers"),
    ("transformer-engine", "transformer_engine", "optional: fused layers and fp8 on GPUs; otherwise torch layers"),
    (
        "apex",
        "apex",
        "optional: NVIDIA's fused optimizer, built from source (apex on PyPI is another project)",
    ),
    ("vllm", "vllm", "optional: rollout engine"),
    ("sglang", "sglang", "optional: rollout engine"),
    ("ray", "ray", "optional: launching over nodes"),
    ("wandb", "wandb", "optional: log.sinks=wandb"),
    ("mlflow", "mlflow-skinny", "optional: log.sinks=mlflow"),
)
IMPORT_SECONDS = 300.0  # limit for the learner's modules, from a cold disk


app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def doctor(
    context: typer.Context,
    python: Annotated[
        list[Path] | None,
        typer.Option(help="an engine's interpreter: compare its torch and NCCL with the learner's; repeatable"),
    ] = None,
) -> None:
    """Show what this machine and this installation can run, or find the cause of a mismatch."""
    if context.invoked_subcommand is not None:
        return
    show(python or ())


def show(engines: Sequence[Path] = ()) -> None:
    """Print packages, devices, whether a learner can start, and the libraries of its and the engines' interpreters.

    Exits with 1 where torch cannot be imported.
    """
    table = Table("package", "version", "what for", title="rl-megatron doctor")
    for distribution, module, purpose in _PACKAGES:
        table.add_row(distribution, _version(distribution, module), purpose)
    console = Console(markup=False)
    console.print(table)
    cores = len(os.sched_getaffinity(0))
    console.print(f"machine: {platform.platform()}, Python {platform.python_version()}, {cores} cores")
    console.print(limits.describe_open_files())
    console.print(_learner())
    console.print(_sandbox())
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of it that is not there is an OSError
        said = traceback.format_exception_only(error)[0].splitlines()[0]
        console.print(
            f"torch: cannot be imported: {said}; install it, or repair its installation (docs/install.md)",
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    print(describe_environments(Path(sys.executable), engines), flush=True)
    if not torch.cuda.is_available():
        console.print("CUDA: none; learner.device=cpu over gloo")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    console.print(f"CUDA {torch.version.cuda}: {', '.join(names)}; learner.device=cuda over NCCL")


def _sandbox() -> str:
    """Says whether this machine can fence programs, by a trial."""
    from rl_megatron.sandbox.executors import find_bubblewrap, find_fence_problem

    why = asyncio.run(find_fence_problem())
    fences = why or (
        f"{find_bubblewrap()} fences a program's files, network, processes and system calls; its time, memory, "
        "processes, output and files are limited"
    )
    return f"sandbox.type=subprocess: {fences}"


def _learner() -> str:
    """Says whether a learner's process can import megatron, which imports optional packages too, even broken ones."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", "import rl_megatron.learner.megatron"],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            env=dict(os.environ),
        )
    except subprocess.TimeoutExpired:
        return f"learner: the import took more than {IMPORT_SECONDS:g} s; check the disk of {sys.prefix}"
    if child.returncode == 0:
        return "learner: can be imported"
    lines = child.stderr.strip().splitlines()
    last = lines[-1] if lines else f"status {child.returncode}"
    where = next((line.strip() for line in reversed(lines) if line.lstrip().startswith("File ")), "nowhere known")
    return f"learner: cannot be imported: {last} ({where}); repair that package's installation, or uninstall it"


def _version(distribution: str, module: str) -> str:
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed, version unknown"
