"""The first messages between the controller and a rank."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from rl_megatron.placement.names import LEARNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The controller's message to all ranks of a role, one line of JSON."""

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
    """A rank's first message, as JSON: who it is and, from rank 0, the address of torch.distributed's store."""

    rank: int
    node: str
    pid: int
    store: str
    step: str  # Slurm's "<job>.<step>"; without Slurm the parts are empty
    role: str = LEARNER

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


def this_node() -> str:
    """This node's name: Slurm's in a Slurm job."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())
