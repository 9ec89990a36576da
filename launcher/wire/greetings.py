"""The first messages between the controller and a rank."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from rl_megatron.placement.names import LEARNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the controller tells all its ranks of a role, one line of JSON."""

    host: str
    port: int
    token: str  # hexadecimal
    threads: int
    device: str  # learner.device
    role: str = LEARNER

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a rank says first, as JSON: who it is and, of rank 0, where it serves the store of torch.distributed."""

    rank: int
    node: str
    pid: int
    store: str
    step: str  # "<job>.<step>" of Slurm, else parts are empty
    role: str = LEARNER

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


def this_node() -> str:
    """This node's name, as Slurm has it where this is a job of its."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())
