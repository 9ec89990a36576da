"""The console command ``rl-megatron`` (also ``python -m launcher``): its commands; its entry is launcher/entry.py."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typing_extensions import override

from launcher.processes import limits
from rl_megatron.config.removed import COMMANDS as REMOVED_COMMANDS
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.user_code import import_from

_COMMANDS = {
    "train": "train:train",
    "submit": "submit:submit",
    "status": "job:status",
    "report": "report:report",
    "convert": "convert:convert",
    "verify": "verify:verify",
    "inspect": "inspect:inspect",
    "plan": "plan:plan",
    "scale": "scale:scale",
    "eval": "evaluate:evaluate",
    "doctor": "doctor:app",
    "experiment": "experiment:app",
}
"""In the order of the help, by name: a module of ``launcher.commands``, and its function or its typer application."""


class _Imported(Mapping[str, Any]):
    """The commands by name. Each module is imported when its command is looked up: all of them take a second."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = _COMMANDS[name].partition(":")
        found = getattr(importlib.import_module(f"launcher.commands.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(name)(function)
        command = typer.main.get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = cast(MutableMapping[str, Any], _Imported())

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in REMOVED_COMMANDS:
            ctx.fail(f"no command {args[0]!r} any longer; {REMOVED_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        gone = os.environ.get("PWD", "")
        raise ConfigError(f"the current folder, {gone}, has been removed; change to one that is there") from error
    for what, text in (("the current folder", str(here)), *(("an argument", one) for one in sys.argv[1:])):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{what}, {os.fsencode(text)!r}, is not UTF-8, which files of a run need; rename it"
            ) from error
    import_from(here)


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
