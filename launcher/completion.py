"""Arguments of several commands, and what a shell completes for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rl_megatron.config.errors import every_key
from rl_megatron.files import shipped


def complete_config(incomplete: str) -> list[str]:
    """Returns names under conf/. A shell completes files by itself where there are none."""
    return sorted(path.stem for path in shipped("conf").glob(f"{_plain(incomplete)}*.yaml"))


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns keys and groups with a ``=``, or choices of a group. bash splits words at ``=``."""
    given: Sequence[str] = [*(ctx.params.get("overrides") or ())]
    words = [*(given[-2:] if given[-1:] == ["="] else given[-1:] if not incomplete else ()), incomplete]
    *split, value = words if len(words) > 1 and _choices(words[0], "") else [incomplete]
    group, equals, start = value.partition("=")
    if split:
        return _choices(split[0], value)
    if equals:
        return [f"{group}={choice}" for choice in _choices(group, start)]
    groups = {path.parent.name for path in shipped("conf").glob("*/*.yaml")}
    return [f"{key}=" for key in sorted({*groups, *every_key()}) if key.startswith(incomplete) and "<" not in key]


def _choices(group: str, start: str) -> list[str]:
    return sorted(path.stem for path in (shipped("conf") / _plain(group)).glob(f"{_plain(start)}*.yaml"))


def _plain(text: str) -> str:
    return "".join(letter for letter in text if letter.isalnum() or letter in "_-")


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, or group=name", autocompletion=complete_override),
]
