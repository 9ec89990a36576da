"""Generates docs/commands.md from the commands' help: ``python -m launcher.docs > docs/commands.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import typer

from launcher.__main__ import app

_HEAD = """\
# Commands

Generated from `rl-megatron COMMAND --help`. [Configuration](configuration.md) lists the keys of `section.key=value`.

| exit status | meaning |
|--:|---|
| 0 | success; also a run that saved and stopped after Ctrl-C or SIGTERM |
| 1 | an error, which is printed, or a failed check |
| 2 | a wrong command, option or argument; the usage is printed |
| 130, 143 | Ctrl-C (130) or SIGTERM (143) before the run began; 130 also after a second Ctrl-C |
"""


def render() -> str:
    """Returns the page, with a section for each command."""
    commands = cast(Any, typer.main.get_command(app)).commands
    return _HEAD + "".join(part for name in commands for part in _sections(name, commands[name]))


def _sections(name: str, command: Any) -> Iterator[str]:
    """Yields the section of a command, and those of its own commands."""
    inner = getattr(command, "commands", {})
    words = [name, *(_form(one) for one in command.params if one.opts[0] == one.name), *["[COMMAND]"] * bool(inner)]
    yield f"\n## {name}\n\n`rl-megatron {' '.join(words)}`\n"
    yield from (f"\n{_line(paragraph)}\n" for paragraph in command.help.split("\n\n"))
    if rows := [f"| `{_form(one)}` | {_line(one.help)}{_default(one)} |\n" for one in command.params]:
        yield "\n| argument or option | meaning |\n|---|---|\n" + "".join(rows)
    yield from (part for one in inner if not inner[one].hidden for part in _sections(f"{name} {one}", inner[one]))


def _form(one: Any) -> str:
    """Returns an argument as the usage has it, an option with a word for its value."""
    if one.opts[0] == one.name:
        word = one.metavar or one.name.upper() + "..." * (one.nargs == -1)
        return word if one.required else f"[{word}]"
    return ", ".join(one.opts) + ("" if one.is_flag else f" {one.metavar or one.name.upper()}")


def _default(one: Any) -> str:
    return "" if one.default in (None, False) or not one.show_default else f" (default: `{one.default}`)"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("|", r"\|")


if __name__ == "__main__":
    print(render(), end="")
