"""What the rehearsal tells the task of each node, and each process that measures links. JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Who takes part, where they meet, and what is measured."""

    nodes: Sequence[tuple[str, int]]  # each node in order, and its number of processes
    groups: Sequence[tuple[str, Sequence[Sequence[int]]]]  # kinds of groups, and the groups' processes
    store: tuple[str, int]  # of torch.distributed
    device: str  # learner.device
    threads: int  # of each process
    num_bytes: int  # that a process puts into each operation
    seconds: float  # the limit of any of them
    answers: str  # the folder for a file of each node
    disks: Sequence[str]  # folders whose disks are measured

    @property
    def size(self) -> int:
        """The number of processes."""
        return sum(count for _, count in self.nodes)

    def processes(self, node: str) -> range:
        """The processes of a node. Raises ValueError if it takes no part."""
        first = 0
        for name, count in self.nodes:
            if name == node:
                return range(first, first + count)
            first += count
        raise ValueError(f"this node, {node}, is none of {', '.join(name for name, _ in self.nodes)}")

    def pairs(self) -> list[tuple[int, int]]:
        """The first processes of each node and of the next, the last node's next is the first: two nodes are one pair.

        In rounds of pairs that share no node: those that begin at even nodes, those at odd ones, an odd last one alone.
        """
        first = [self.processes(name)[0] for name, _ in self.nodes]
        count = len(first)
        begins = range(count) if count > 2 else range(count - 1)
        ordered = sorted(begins, key=lambda i: (i == count - 1 and count % 2 == 1, i % 2))
        return [(first[i], first[(i + 1) % count]) for i in ordered]

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: str) -> Survey:
        """The message that was sent."""
        fields = json.loads(line)
        nodes = [(str(name), int(count)) for name, count in fields.pop("nodes")]
        return cls(**{**fields, "nodes": nodes, "store": (fields["store"][0], int(fields["store"][1]))})
