"""``rl-megatron engines``: the engine servers of a running job, which may join and leave."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.commands.job import RunFolder, ask_there
from launcher.commands.joining import join_cluster_of
from launcher.control.address import address_of
from launcher.control.client import Late, ask_run
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError

_LIST_SECONDS = 60.0
_END_SECONDS = 120.0  # for a server's requests to be aborted, and its processes to end
_GOES_ON = "it goes on, and `rl-megatron engines {}` shows how far it is"
_COLUMNS = ("server", "state", "node", "version", "completions", "restarts")


class Action(StrEnum):
    """What to do with a run's servers."""

    LIST = "list"
    ADD = "add"
    DROP = "drop"
    JOIN = "join"


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
    seconds: Annotated[
        float | None,
        typer.Option(
            help="add, drop: the longest to wait [default: the run's limits of a start, a push and an end]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the engine servers of a running job, start more, or have one leave; waits until that is done.

    join, on a node that the job does not have: makes it one of the job's Ray cluster, until Ctrl-C or the run's end.
    Ctrl-C and --seconds end the waiting, not what was asked. Of a Slurm job, it asks on the controller's node, by srun.
    """
    if action is Action.DROP and number is None:
        raise ConfigError("drop needs the number of a server; rl-megatron engines RUN lists them")
    if (node is not None and action is not Action.ADD) or (drain and action is not Action.DROP):
        raise ConfigError("--node is for add, --drain for drop")
    if action is Action.JOIN:
        join_cluster_of(run)
        return
    ask_there(run, address_of(run))
    rows = _asked(run, action, number, node, drain, limit_of(run, action, drain) if seconds is None else seconds)
    print("\n".join(_table(rows)))


def limit_of(run: Path, action: Action, drain: bool) -> float | None:
    """How long to wait, in seconds, by the limits of the run's own configuration.

    None: for as long as its completions run, where ``rollout.max_seconds`` does not limit them.
    """
    if action is Action.LIST:
        return _LIST_SECONDS
    config = load_config(str(run / "config.yaml"), [])
    push = config.watchdog_seconds  # a server that joins may wait for the next, one that leaves for the one under way
    if action is Action.ADD:
        return config.rollout.server.start_seconds + push
    if not drain:
        return push + _END_SECONDS
    return None if config.rollout.max_seconds is None else push + _END_SECONDS + config.rollout.max_seconds


def _asked(
    run: Path, action: Action, number: int | None, node: str | None, drain: bool, seconds: float | None
) -> list[dict[str, Any]]:
    match action:
        case Action.LIST:
            arguments: dict[str, object] = {}
        case Action.ADD:
            arguments = {"count": 1 if number is None else number, "node": node}
        case Action.DROP:
            arguments = {"number": number, "drain": drain}
    try:
        rows: list[dict[str, Any]] = ask_run(run, "engines", seconds=seconds, action=action.value, **arguments)
    except Late as error:
        if action is Action.LIST:
            raise
        between = _in_between(ask_run(run, "engines", seconds=_LIST_SECONDS, action=Action.LIST.value))
        raise ConfigError(
            f"{action} is not done after {seconds:g} s: {between}; {_GOES_ON.format(run)}; --seconds sets another limit"
        ) from error
    except KeyboardInterrupt:
        print(f"not waited for; {_GOES_ON.format(run)}", file=sys.stderr)
        raise typer.Exit(130) from None
    return rows


def _in_between(rows: list[dict[str, Any]]) -> str:
    """The servers that do not serve yet, or not any more, with what they wait for as far as the run says it."""
    found = []
    for row in rows:
        running = f" with {row['completions']} completions" if row["completions"] else ""
        if row["state"] not in ("healthy", "gone"):
            found.append(f"server {row['number']} is {row['state']}{running}")
    return "; ".join(found) or "all its servers serve, so it waits for a push of weights"


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
