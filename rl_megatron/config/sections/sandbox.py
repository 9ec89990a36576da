"""The ``sandbox`` section: where code that a model wrote runs, and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from rl_megatron.http.urls import is_loopback, secret_in
from rl_megatron.section import Positive, PositiveFloat, Section


class SandboxSection(Section):
    """Where code that a model wrote runs, for reward.function=tests and environments that ask for it
    (docs/sandbox.md)."""

    type: Literal["subprocess", "remote"] = "subprocess"
    """subprocess: a process of this machine that bubblewrap fences; remote: a server of yours at ``url``."""
    seconds: PositiveFloat = 10.0
    """Time limit of a program, and limit of the processor time of its processes; then it is killed with all that it
    started."""
    memory_mb: Positive = 1024
    """Limit of a program's memory, in MiB: of all its processes, and of what each may ask for."""
    allow_unfenced: bool = False
    """type=subprocess: whether programs run as your own user, with your files and your network, where there is no
    bubblewrap, or the kernel allows no namespaces; else that is refused."""
    url: str | None = None
    """type=remote: where programs are posted to; https, or this machine."""
    token_file: Path | None = None
    """type=remote: a file with the server's token, which only you can read; read for each attempt, as the token may
    rotate."""

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        for key, kind in (("allow_unfenced", "subprocess"), ("url", "remote")):
            given = getattr(self, key)
            if given and self.type != kind:
                raise ValueError(f"sandbox.{key}={given} with sandbox.type={self.type}: only {kind} reads it")
            if not given and self.type == kind and key != "allow_unfenced":
                raise ValueError(f"sandbox.type={kind} needs sandbox.{key}")
        if self.token_file is not None and self.type != "remote":
            raise ValueError(f"sandbox.token_file with sandbox.type={self.type}: only remote reads it")
        if self.url is not None:
            parts = urlsplit(self.url)
            if secret := secret_in(self.url):
                raise ValueError(
                    f"sandbox.url: the address has {secret}, and the configuration is in a file that others may read; "
                    "leave it out, and give the server's token by sandbox.token_file"
                )
            if not parts.hostname or parts.scheme not in ("http", "https"):
                raise ValueError(f"sandbox.url={self.url!r:.200}: write it as https://host:port/path")
            if parts.scheme == "http" and not is_loopback(parts.hostname):
                raise ValueError(
                    f"sandbox.url={self.url!r:.200}: programs and the token would cross the network in the clear; use "
                    "https, or an address of this machine (localhost, 127.0.0.1, ::1)"
                )
        return self
