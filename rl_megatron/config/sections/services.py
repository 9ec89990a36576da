"""The ``services`` section: servers that a run starts and ends."""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rl_megatron.section import NonNegative, Positive, PositiveFloat, Section

SERVICE = "service:"
"""Begins the name of a service of the run, as in service:judge/score."""


def _of_words(text: str) -> str:
    try:
        words = shlex.split(text)
        [word.format(host="", port="") for word in words]
    except (ValueError, KeyError, IndexError) as error:
        raise PydanticCustomError(
            "command", "Input should be a command that names host and port alone in braces"
        ) from error
    if not words:
        raise PydanticCustomError("command", "Input should be a command, but it is empty")
    return text


class ServiceSection(Section):
    """A server that the run starts before its ranks, waits for, watches, and ends with itself (docs/services.md)."""

    command: Annotated[str, AfterValidator(_of_words)]
    """What starts it, split like a shell's words but run without one; {host} and {port} are where it shall listen, also
    in SERVICE_HOST and SERVICE_PORT. The key that requests carry is in SERVICE_KEY."""
    replicas: Positive = 1
    """Servers of this command; requests take turns."""
    health: Annotated[str, Field(pattern=r"^/[!-~]*$")] = "/health"
    """Path that answers 200 once it serves."""
    start_seconds: PositiveFloat = 300.0
    """Time limit until ``health`` answers."""
    restarts: NonNegative = 3
    """Most restarts of a replica that ended; at one more the run ends. Once it has run for an hour they count from 0
    again."""
