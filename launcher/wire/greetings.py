"""The first messages between the controller and a rank.

The setup that the controller sends a rank after its imports.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import LEARNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The controller's message to a rank, one line of JSON."""

    host: str
    port: int
    token: str  # hexadecimal
    seconds: float  # for which the rank tries to connect
    threads: int
    device: str  # learner.device
    role: str = LEARNER
    store: bool = True  # whether rank 0 listens for torch.distributed's store; else the ranks meet at a file
    cpus: Sequence[int] = ()  # that it runs on; empty: on all that its parent may
    hindered: str = ""  # why it is no fork of the process that imported for its node

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def to_rank(self, role: str, hindered: str, cpus: Sequence[int]) -> Call:
        """What the parent of a node's ranks tells one of them."""
        return replace(self, role=role, hindered=hindered, cpus=cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Muster:
    """The controller's message to all nodes of a step, one line of JSON: which ranks each starts."""

    call: Call
    nodes: Sequence[str]  # in the order of their ranks
    ranks_per_node: Mapping[str, int]  # of each role that the nodes have ranks of
    folder: str = ""  # of the ranks' output files; empty: their output is this process's
    parent: int | None = None  # the controller's pid if the node is its child, on its machine; None: Slurm started it
    stderr: Sequence[int] = ()  # of a child: its descriptors that are its ranks' stderr, in their order

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: str) -> Muster:
        """The message that was sent."""
        fields = json.loads(line)
        return cls(**{**fields, "call": Call(**fields["call"])})

    def ranks_of(self, node: str) -> list[tuple[str, int]]:
        """The ranks of a node, by role and number. Raises ValueError if it is none of them."""
        if node not in self.nodes:
            raise ValueError(f"this node, {node}, is none of the step's: {', '.join(self.nodes)}")
        index = self.nodes.index(node)
        return [(role, index * each + local) for role, each in self.ranks_per_node.items() for local in range(each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message, as JSON: who it is and, from rank 0, the address of torch.distributed's store."""

    rank: int
    node: str
    pid: int
    store: str
    step: str  # Slurm's "<job>.<step>"; without Slurm the parts are empty
    role: str = LEARNER
    hindered: str = ""  # see Call

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


def this_node() -> str:
    """This node's name: Slurm's in a Slurm job."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup of a worker. Folders are absolute and the same on every node."""

    config: RunConfig
    model_folder: Path
    run_folder: Path
    rendezvous: str  # a torch.distributed init method
    role: str = LEARNER
    first_device: int = 0  # on each node its first rank's; neighbouring ranks take one each
    ranks_per_node: int | None = None  # None: all are on one
    code: Path = field(default_factory=Path.cwd)  # the folder of the user's own modules
    stacks: Path | None = None  # the folder for stacks if this start hangs

    def gpu_of(self, rank: int) -> int:
        """The number of the rank's GPU among those of its node."""
        return self.first_device + (rank if self.ranks_per_node is None else rank % self.ranks_per_node)
