"""The ``services`` section: servers that a run starts and ends; and teachers behind servers, the entries of
``algorithm.kl.teachers``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rl_megatron.section import LISTED, NonNegative, OwnCode, Positive, PositiveFloat, Section

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
    """Most restarts of a replica that ended; at one more the run ends."""


TeacherName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


def is_plain_address(text: str) -> bool:
    """Whether it is http(s)://host:port, without user, path or query."""
    try:
        url = urlsplit(text)
        fits = url.scheme in {"http", "https"} and url.hostname and url.port is not None and url.path in {"", "/"}
        return bool(fits) and not (url.query or url.fragment or "@" in url.netloc or re.search(r"[^!-~]", text))
    except ValueError:
        return False


def _of_server(text: str) -> str:
    if not re.fullmatch(re.escape(SERVICE) + r"[a-z][a-z0-9_]*", text) and not is_plain_address(text):
        raise PydanticCustomError("server", "Input should be service:<name> or http://host:port, without user or path")
    return text


TEACHER = "teacher_"
"""How roles of teachers begin."""


def teacher_role(name: str) -> str:
    """The role of a teacher among a run's models, and of its ranks."""
    return f"{TEACHER}{name}"


class TeacherSection(Section):
    """A model that judges what the policy samples (docs/distillation.md), on ranks of its own or behind a server of an
    engine."""

    server: Annotated[str, AfterValidator(_of_server)] | None = None
    """service:<name> of ``services``, or http(s)://host:port of a server that runs already; null: ranks of the run's
    own hold it, in the learner's layout or that of ``roles.layouts.teacher_<name>``."""
    engine: Literal["vllm", "sglang"] | OwnCode | None = None
    """What the server is: vllm, sglang, or ``package.module:Class``, an engine of your own; null without a server."""
    path: Path
    """Hugging Face folder of the teacher; of one behind a server, config.json and tokenizer.json are read here."""
    weight: PositiveFloat = 1.0
    """Weight of its log-probs among those of all teachers of a prompt, which add up to 1."""
    sources: Annotated[tuple[str, ...], LISTED] = ()
    """The sources of ``data.sources`` whose prompts it judges; none: all."""
    token_file: Path | None = None
    """File with the bearer token of a server that runs already; a service has a key of its own."""
    concurrency: Positive = 64
    """Most sequences in flight."""
    timeout_seconds: PositiveFloat = 600.0
    """Time limit of one attempt at a sequence."""
    retries: NonNegative = 5
    """Most retries of a sequence, after 1, 2, 4, ... seconds; after that the run ends."""

    @model_validator(mode="after")
    def _of_one_place(self) -> Self:
        of_server = ("engine", "token_file", "concurrency", "timeout_seconds", "retries")
        fields = type(self).model_fields
        given = [key for key in of_server if getattr(self, key) != fields[key].default] if self.server is None else []
        if given:
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])} without a server: the run's own ranks hold this teacher; give "
                f"server, or leave {given[0]} out"
            )
        if self.server is None:
            return self
        if self.engine is None:
            raise ValueError(f"server={self.server} without engine; give engine=vllm or sglang, which serves there")
        if self.token_file is not None and self.server.startswith(SERVICE):
            raise ValueError(f"token_file={self.token_file}: {self.server} has a key of its own; leave token_file out")
        return self
