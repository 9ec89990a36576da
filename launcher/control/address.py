"""Where a running run listens for commands: ``control.json`` in its folder names the node and the socket there.

The socket itself is in a folder of its own outside of the run's, which may be on a disk that has no sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from launcher.wire.greetings import this_node
from rl_megatron.durable import write_atomically
from rl_megatron.errors import ConfigError
from rl_megatron.json_text import parse

LONGEST_LINE = 1 << 16
"""Bytes of a request or an answer, newline included."""
_FILE = "control.json"
_CREDENTIALS = struct.Struct("3i")  # Linux: pid, uid, gid


class _Socket(Protocol):
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A socket, and the node on which it is."""

    node: str
    path: str
    job: str | None = None  # the Slurm job of which that is a node; of an array's task its own number, not 12_3

    @property
    def here(self) -> bool:
        """Whether this process is on its node."""
        return self.node == this_node()


@contextlib.contextmanager
def findable(run: Path, path: Path) -> Iterator[None]:
    """Have `address_of` find the socket ``path`` of this node while the context is open."""
    file = run / _FILE
    job = os.environ.get("SLURM_JOB_ID") if "SLURMD_NODENAME" in os.environ else None  # not in a shell of salloc
    data = json.dumps(asdict(Address(node=this_node(), path=str(path), job=job))).encode()
    write_atomically(file, data, private=True)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def address_of(run: Path) -> Address:
    """Where the run in this folder listens. Raises ConfigError if it holds no run, or none that listens."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: it holds no run; give a run's folder")
    try:
        data = parse((run / _FILE).read_bytes())
        return Address(node=str(data["node"]), path=str(data["path"]), job=data.get("job"))
    except FileNotFoundError:
        raise ConfigError(not_running(run)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / _FILE}: not written by a run: {error!r}") from error


def not_running(run: Path) -> str:
    """What to say of a run of which no process listens."""
    more = f"rl-megatron status {shlex.quote(str(run))} says more"
    return f"{run}: no process of this run listens: it has ended, or still starts; {more}"


def peer_is_own(stream: _Socket) -> bool:
    """Whether the process at the other end is this user's, as the kernel says."""
    said = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.geteuid())
