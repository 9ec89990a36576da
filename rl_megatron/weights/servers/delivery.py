"""What a delivery of weights is: it brings one version from learner ranks into engine servers, and compares nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from rl_megatron.types import WeightUpdate
from rl_megatron.weights.checks.reports import Kinds, Report
from rl_megatron.weights.servers.mirror import Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A version that every server holds and none serves: what its ranks report, and what each tensor must be."""

    update: WeightUpdate
    reports: Mapping[str, Sequence[Report]]  # by server, one a rank
    seal: Seal  # checksums of what the learner's ranks have, not of what arrived


class Deliver(Protocol):
    """One attempt to deliver a version. After all servers died it can be called again."""

    async def __call__(self, *, private: Kinds, meanwhile: Callable[[], None]) -> Delivered:
        """Ranks report no parameters of ``private`` kinds. ``meanwhile`` is called once all ranks have their orders.

        Raises SyncError; ReplicasLost where all servers died.
        """
        ...


class Delivery(Protocol):
    """The controller calls it, one version after the other."""

    def sending(self, version: int) -> AbstractAsyncContextManager[Deliver]:
        """Yields what delivers ``version`` for as long as the learner holds it. Raises SyncError."""
        ...

    async def filled(self, version: int) -> Seal:
        """Have the mirror file hold ``version``, once it was delivered, as the learner has it at this moment.

        Raises SyncError.
        """
        ...

    async def load(self, version: int, name: str) -> Sequence[Report]:
        """Server ``name``, which came back, loads the filled mirror file; what each of its ranks holds.

        Raises SyncError; ReplicasLost where it died.
        """
        ...
