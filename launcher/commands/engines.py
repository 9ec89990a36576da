"""``rl-megatron engines``: the engine servers of a running job, which may join and leave."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.commands.job import RunFolder
from launcher.control.address import address_of
from launcher.control.client import ask_run
from launcher.hosts.slurm import jobs
from rl_megatron.errors import ConfigError

_LIST_SECONDS = 60.0
_COLUMNS = ("server", "state", "node", "version", "completions", "restarts")


class Action(StrEnum):
    """What to do with a run's servers."""

    LIST = "list"
    ADD = "add"
    DROP = "drop"


def engines(
    run: RunFolder,
    action: Annotated[Action, typer.Argument()] = Action.LIST,
    number: Annotated[
        int | None, typer.Argument(help="add: how many [default: 1]; drop: which server", show_default=False)
    ] = None,
    node: Annotated[str | None, typer.Option(help="add: the node to start on [default: any with room]")] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="drop: let the server end what it samples; else that goes on elsewhere")
    ] = False,
) -> None:
    """List the engine servers of a running job, start more, or have one leave; waits until that is done.

    Ctrl-C ends the waiting, not what was asked. Of a Slurm job, it asks on the controller's node, by srun.
    """
    if action is Action.DROP and number is None:
        raise ConfigError("drop needs the number of a server; rl-megatron engines RUN lists them")
    if (node is not None and action is not Action.ADD) or (drain and action is not Action.DROP):
        raise ConfigError("--node is for add, --drain for drop")
    address = address_of(run)
    if not address.here:
        _ask_there(run, address.node)
    rows = _asked(run, action, number, node, drain)
    print("\n".join(_table(rows)))


def _asked(run: Path, action: Action, number: int | None, node: str | None, drain: bool) -> list[dict[str, Any]]:
    match action:
        case Action.LIST:
            arguments: dict[str, object] = {}
        case Action.ADD:
            arguments = {"count": 1 if number is None else number, "node": node}
        case Action.DROP:
            arguments = {"number": number, "drain": drain}
    try:
        seconds = _LIST_SECONDS if action is Action.LIST else None
        rows: list[dict[str, Any]] = ask_run(run, "engines", seconds=seconds, action=action.value, **arguments)
    except KeyboardInterrupt:
        print(f"not waited for; it goes on, and `rl-megatron engines {run}` shows how far it is", file=sys.stderr)
        raise typer.Exit(130) from None
    return rows


def _ask_there(run: Path, node: str) -> None:
    """Run this command on the controller's node, in the run's job. Raises ConfigError if it has none."""
    if not (run / "jobs" / "id").is_file():
        raise ConfigError(f"{run}: its controller is on {node}; run this command there")
    job = jobs.job_of(run)
    where = (f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", f"--nodelist={node}")
    os.execvp("srun", ["srun", *where, sys.executable, "-m", "launcher", *sys.argv[1:]])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of aligned columns; under a server that died, why."""
    cells = [
        (
            str(row["number"]),
            row["state"],
            ",".join(row["nodes"]),
            "-" if row["version"] is None else str(row["version"]),
            str(row["completions"]),
            str(row["restarts"]),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(_COLUMNS, widths, strict=True)).rstrip()]
    for row, texts in zip(rows, cells, strict=True):
        lines.append("  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip())
        if row["reason"] and row["state"] != "healthy":
            lines.append(f"        {row['reason'].splitlines()[0]}")
    return lines
