"""The console command ``rl-megatron`` (also ``python -m launcher``): its commands; its entry is launcher/entry.py."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from launcher.processes import limits
from rl_megatron.config.removed import COMMANDS as REMOVED_COMMANDS
from rl_megatron.entries import declared, describe_entry, load_entry
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.user_code import add_import_folder

GROUP = "rl_megatron.commands"
"""The group of entry points that are commands: a function or a typer application each. The name ``doctor.x`` is a
command of ``doctor``."""
_COMMANDS = {
    "train": "launcher.commands.train:train",
    "submit": "launcher.commands.submit:submit",
    "status": "launcher.commands.status:status",
    "report": "launcher.commands.report:report",
    "eval": "launcher.commands.evaluate:evaluate",
    "doctor": "launcher.commands.doctor:app",
}
"""The commands in the order of the help, as entry points; commands of tools and other packages follow."""


class _Imported(Mapping[str, Any]):
    """The commands by name. Each module is imported when its command is looked up: all of them take a second."""

    @cached_property
    def entries(self) -> Mapping[str, EntryPoint]:
        """Raises ConfigError if the installed package has none, or one has the name of another command."""
        found = {name: EntryPoint(name, value, GROUP) for name, value in _COMMANDS.items()}
        for name, entry in declared("command", GROUP, own=True).items():
            if name in REMOVED_COMMANDS:  # an installation older than the code has it
                continue
            if name in found:
                said = describe_entry("command", entry)
                raise ConfigError(f"{said} has the name of another command; rename it, or uninstall it")
            found[name] = entry
        return found

    def __getitem__(self, name: str) -> Any:
        found = load_entry("command", self.entries[name])
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(name)(function)
        for below, entry in self.entries.items():
            if below.startswith(f"{name}."):
                found.command(below.removeprefix(f"{name}."))(load_entry("command", entry))
        command = typer.main.get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.entries if "." not in name)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _help_of(entry: EntryPoint) -> str:
    """Returns the docstring of a command's function, or of its application's callback, without importing the module."""
    try:
        spec = importlib.util.find_spec(entry.module)
        if spec is None or spec.origin is None:
            return f"cannot be loaded: no module {entry.module}"
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (ImportError, OSError, ValueError, SyntaxError) as error:  # another package's; running it says more
        return f"cannot be loaded: {error}"
    for each in tree.body:
        if isinstance(each, ast.FunctionDef) and (
            each.name == entry.attr or f"{entry.attr}.callback" in map(_called, each.decorator_list)
        ):
            return ast.get_docstring(each) or ""
    return ""


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


class _Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._imported = _Imported()
        self.commands = cast(MutableMapping[str, Any], self._imported)

    @override
    def format_help(self, ctx: Any, formatter: Any) -> None:
        entries = self._imported.entries
        self.commands = {name: TyperCommand(name, help=_help_of(entries[name])) for name in self._imported}
        super().format_help(ctx, formatter)

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


def _version(requested: bool) -> None:
    if requested:
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
    add_import_folder(here)


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
