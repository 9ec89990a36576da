"""Asks a running run, from a process of the same user on the controller's node.

Run as ``python -m launcher.control.client RUN COMMAND ARGUMENTS``, with arguments as JSON, it prints the answer so.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from launcher.control.address import LONGEST_LINE, address_of, not_running, peer_is_own
from rl_megatron.errors import ConfigError

_CONNECT_SECONDS = 10.0


class Late(ConfigError):
    """The run has not answered in time; what it was asked for goes on."""


def ask_run(run: Path, command: str, *, seconds: float | None = None, **arguments: object) -> Any:
    """The run's answer to ``command``, as JSON holds it; None: wait for it without a limit.

    Raises ConfigError with what the run refuses; if the run does not listen, listens on another node, or as another
    user; Late if it does not answer within ``seconds``.
    """
    address = address_of(run)
    if not address.here:
        raise ConfigError(f"{run}: its controller is on {address.node}: run this command there")
    line = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(_CONNECT_SECONDS)
        try:
            stream.connect(address.path)
            if not peer_is_own(stream):
                raise ConfigError(f"{run}: another user listens at {address.path}; nothing was sent")
            stream.sendall(line)
            stream.settimeout(seconds)
            answer = _line(stream)
        except (FileNotFoundError, ConnectionError) as error:
            raise ConfigError(not_running(run)) from error
        except TimeoutError as error:
            raise Late(f"{run}: its controller did not answer in time; log.txt says what it does") from error
    if not answer:
        raise ConfigError(f"{run}: the run ended before it answered")
    said = json.loads(answer)
    if "error" in said:
        raise ConfigError(str(said["error"]))
    return said["answer"]


def _line(stream: socket.socket) -> bytes:
    """What is sent until the end of a line; nothing if the other end closes before."""
    found = b""
    while not found.endswith(b"\n") and len(found) <= LONGEST_LINE:
        part = stream.recv(LONGEST_LINE)
        if not part:
            return b""
        found += part
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(ask_run(Path(sys.argv[1]), sys.argv[2], **json.loads(sys.argv[3]))))
    except ConfigError as said:
        sys.exit(str(said))
