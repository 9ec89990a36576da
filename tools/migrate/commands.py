"""``rl-megatron import``: makes a configuration of another framework's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError
from tools.migrate.core import READERS, Imported, import_file, render


def import_command(
    file: Annotated[
        Path,
        typer.Argument(help="a script or YAML of verl or TRL, or a script of slime", show_default=False),
    ],
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="write the configuration to a new file, not to the screen")
    ] = None,
    framework: Annotated[
        str | None, typer.Option("--from", help="verl, TRL or slime, if the file does not show which")
    ] = None,
) -> None:
    """Make a configuration of a verl, TRL or slime file. Each key has its source as a comment, also their defaults that
    change the loss. Keys without a counterpart are listed. Values that change the loss and have none are an error. The
    file is read, not run.
    """
    names = {name.lower(): name for name in READERS}
    if framework is not None and framework.lower() not in names:
        raise ConfigError(f"--from {framework}: must be one of {', '.join(READERS)}")
    imported = import_file(file, names[framework.lower()] if framework else None)
    text = page(imported, file, write)
    if write is None:
        print(text, end="")
        return
    if write.exists():
        raise ConfigError(f"--write {write}: the file exists; remove it, or give another name")
    try:
        write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {write}: cannot be written: {error.strerror}") from error
    print(f"written: {write}: {len(imported.lines)} keys from {imported.framework}, row {imported.row}")
    for line in imported.to_set:
        print(f"set: {line}")
    print(f"not carried over: {len(imported.not_carried)} of the keys of {file}, listed at the end of {write}")
    print(f"check it: rl-megatron train --config {write} --check")
    for line in _layout(imported, write):
        print(f"plan it: {line}")


def page(imported: Imported, file: Path, write: Path | None) -> str:
    """Returns the file to write. Comments before the configuration say what to set, and after it what is left out."""
    name = write or "FILE.yaml"
    head = [
        f"From {file} ({imported.framework}), by rl-megatron import.",
        *(f"Set: {line}" for line in imported.to_set),
    ]
    head += [f"Then: rl-megatron train --config {name} --check"]
    head += [f"For a layout that fits: {line}" for line in _layout(imported, name)]
    tail = [f"Keys of {imported.framework} that are not carried over:", *(f"- {line}" for line in imported.not_carried)]
    return _comments(head) + render(imported.row, imported.lines) + (_comments(tail) if imported.not_carried else "")


def _layout(imported: Imported, name: Path | str) -> list[str]:
    """Returns the command that finds a layout, if the job samples with servers."""
    slurm, gpus = imported.config.slurm, "N"
    if imported.config.job != "rl" or imported.config.rollout.engine == "local":
        return []
    if slurm.gpus_per_node:
        gpus = str(slurm.nodes * slurm.gpus_per_node)
    return [f"rl-megatron scale {name} gpus={gpus} gpu=h100 --write LAYOUT.yaml"]


def _comments(lines: list[str]) -> str:
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
