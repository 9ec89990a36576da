"""The protocol of a delivery: it moves one weight version from learner ranks to engine servers, without verifying."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from rl_megatron.types import WeightUpdate
from rl_megatron.weights.checks.reports import Kinds, Report
from rl_megatron.weights.routes.mirror import Seal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A version that every server holds and none serves yet: the ranks' reports, and the checksums to compare with."""

    update: WeightUpdate
    reports: Mapping[str, Sequence[Report]]  # by server, one per rank
    seal: Seal  # checksums of the learner's tensors, not of what arrived


def with_error(update: WeightUpdate, seal: Seal) -> WeightUpdate:
    """The update with the seal's error of quantised weights, which it logs; as it is if none are."""
    if seal.error is None:
        return update
    error, tensor = seal.error
    logger.info("version %d is quantised: largest relative error of a tensor %.3g, %s", update.version, error, tensor)
    return replace(update, quantization_error=error)


class Deliver(Protocol):
    """Delivers a version. If all servers died it can be called again."""

    async def __call__(self, *, private: Kinds, meanwhile: Callable[[], None]) -> Delivered:
        """Ranks do not report parameters of ``private`` kinds. Calls ``meanwhile`` once all ranks have their orders.

        Raises SyncError; ReplicasLost if all servers died.
        """
        ...


class Delivery(Protocol):
    """Delivers versions, one after the other. Controller process."""

    def sending(self, version: int) -> AbstractAsyncContextManager[Deliver]:
        """Yield a `Deliver` of ``version``, valid while the learner holds it. Raises SyncError."""
        ...

    async def filled(self, version: int) -> Seal:
        """Ensure that the mirror file holds the delivered ``version``, from the learner's present weights.

        Raises SyncError.
        """
        ...

    async def load(self, version: int, name: str) -> Sequence[Report]:
        """Have the restarted server ``name`` load the filled mirror file. Returns its ranks' reports.

        Raises SyncError; ReplicasLost if it died.
        """
        ...
