"""What the controller asks of a rank's process, wherever that runs: hosts implement it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol


class RankProcess(Protocol):
    """One rank's process and the stream to it."""

    role: str
    rank: int
    where: str  # how messages name it: "pid 12", "pid 12 on node2"
    connection: Connection

    def ending(self, hung_up: threading.Event) -> Ending:
        """Block until it ended. ``hung_up`` is set once its stream is at an end."""
        ...

    def wake(self) -> None:
        """Have it run on where it was stopped."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def join(self, seconds: float) -> bool:
        """Whether it ended within ``seconds``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended; ``expected`` after it was asked to, ``killed`` where what its peers say is noise."""

    how: str
    expected: bool
    killed: bool
