"""Two-phase commit of weight versions in one process: staged in place, served once every process has staged them.

Staging overwrites the engine's only copy, so the engine serves nothing from then until the commit. The controller
stages on all processes, then commits on all or none.
"""

from __future__ import annotations

from typing import Protocol

from rl_megatron.errors import SyncError
from rl_megatron.types import WeightUpdate


class Transport(Protocol):
    """Executes a plan. Every process of the plan has one, with its own ends of it."""

    def move(self, version: int) -> WeightUpdate:
        """Write this process's destination tensors in place and verify them. All processes call it together.

        Raises CorruptionError, after moving everything, if a box is not what was sent, and SyncError if a process was
        lost; either way the destination is partly written.
        """
        ...

    def close(self) -> None:
        """Release buffers and connections. Not collective."""
        ...


class Servable(Protocol):
    """An engine that serves a version of the weights, or none."""

    def withdraw(self) -> None:
        """Serve nothing until `serve`."""
        ...

    def serve(self, version: int) -> None:
        """Serve the weights now in place as ``version``."""
        ...


class Staging:
    """The staging of one process's engine behind a transport. A process that only sends has no engine."""

    def __init__(self, transport: Transport, engine: Servable | None) -> None:
        self._transport, self._engine = transport, engine
        self._staged: int | None = None

    def stage(self, version: int) -> WeightUpdate:
        """Phase one: withdraw the engine, move and verify. Collective; raises as `Transport.move` does."""
        self._staged = None
        if self._engine is not None:
            self._engine.withdraw()
        update = self._transport.move(version)
        self._staged = version
        return update

    def commit(self, version: int) -> None:
        """Phase two: serve the staged version. Raises SyncError for any other version."""
        if self._staged != version:
            raise SyncError(
                f"version {version} cannot be committed, because what is staged here is "
                f"{'nothing' if self._staged is None else f'version {self._staged}'}; push it again"
            )
        self._staged = None
        if self._engine is not None:
            self._engine.serve(version)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()
