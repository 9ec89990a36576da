"""Executes a plan inside one process by copies, without a process group."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor
from typing_extensions import override

from rl_megatron.errors import WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.transports.commit import Transport
from rl_megatron.weights.transports.ends import PlanEnds


class MemoryTransport(Transport):
    """Copies weights when learner and engine share the only process. Raises WeightError if the plan needs another."""

    def __init__(
        self,
        moves: Plan,
        *,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        verify: bool = True,
    ) -> None:
        others = sorted({process for pair in moves.traffic() for process in pair} - {0})
        if others:
            raise WeightError(
                "memory copies within one process, but the plan moves weights between this one (0) and "
                f"{', '.join(map(str, others))}; use weights.transport=shared_memory or process_group"
            )
        self.ends = PlanEnds(moves, rank=0, src=src, dst=dst, exchange=lambda mine: [mine], verify=verify)

    @override
    def move(self, version: int) -> WeightUpdate:
        started = time.perf_counter()
        self.ends.begin()
        verified = self.ends.finish(version)
        seconds = time.perf_counter() - started
        return WeightUpdate(version=version, num_bytes=0, seconds=seconds, verify_seconds=verified)

    @override
    def close(self) -> None:
        """Does nothing: no buffer is held."""
