"""Starts learner ranks as actors (actors.py) of a Ray cluster (cluster.py).

Like every rank, an actor connects back to the controller with the run's token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from launcher.controller.arrivals import ConnectingLauncher, StartedRanks
from launcher.controller.group import retrieve_exception
from launcher.hosts.ray.cluster import RayCluster, describe_end, make_group
from launcher.hosts.ray.node import Bundle
from launcher.processes.environment import threads_per_rank, threads_per_worker
from launcher.wire import Call
from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import file_stem, rank_label

# isort: split
import ray  # imported after cluster, which sets variables that it reads
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.hosts.ray.actors import RankActor

Who = tuple[str, int]
"""A role, and the number of one of its ranks."""

_CAUSE_SECONDS = 20.0


class RayLauncher(ConnectingLauncher):
    """Starts the workers of a run as actors of a running cluster."""

    def __init__(
        self, cluster: RayCluster, model_folder: Path, run_folder: Path, on_signal: Callable[[str], None]
    ) -> None:
        super().__init__(model_folder, run_folder, on_signal)
        self._cluster = cluster

    @override
    async def _address(self) -> str:
        return self._cluster.host

    @override
    def _threads(self, config: RunConfig) -> int:
        return threads_per_rank(self._cluster.placements[0]) if self._cluster.allocation else threads_per_worker(config)

    @override
    @contextlib.asynccontextmanager
    async def _begin(self, config: RunConfig, call: Call) -> AsyncIterator[StartedRanks]:
        cluster, allocation = self._cluster, self._cluster.allocation
        ends: dict[Who, Future[None]] = {}
        for role, bundles in cluster.shares.ranks.items():
            ends |= await cluster.place(_start_ranks, bundles, replace(call, role=role), cluster.folder)
        files = f"{', '.join(file_stem(role, '*') for role in cluster.shares.ranks)}.txt"
        yield StartedRanks(
            placements=cluster.placements,
            ended=_first_end(ends),
            folder=cluster.folder,
            output=f"{files} in {cluster.folder} have their output",
            report_lost_nodes=allocation.blame if allocation else lambda _: None,
            cause=lambda role, rank: _cause(ends[role, rank]),
        )


def _start_ranks(bundles: Mapping[str, Sequence[Bundle]], call: Call, folder: Path) -> dict[Who, Future[None]]:
    """Starts an actor for each rank, in its node's placement group. Returns a future of each one's end."""
    actor: Any = ray.remote(RankActor)
    ends: dict[Who, Future[None]] = {}
    for node, each in bundles.items():
        group = make_group(call.role, node, each)
        for index in range(len(each)):
            number = len(ends)
            here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            made = actor.options(num_cpus=1, scheduling_strategy=here, name=rank_label(call.role, number)).remote()
            log = str(folder / f"{file_stem(call.role, number)}.txt")
            ends[call.role, number] = made.serve.remote(call, number, log).future()
    return ends


async def _first_end(ends: Mapping[Who, Future[None]]) -> str:
    """Waits until an actor ends, and returns how the first one did."""
    waiting = {who: asyncio.wrap_future(end) for who, end in ends.items()}
    for one in waiting.values():
        one.add_done_callback(retrieve_exception)
    await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
    who = next(who for who, one in waiting.items() if one.done())
    return f"the actor of {rank_label(*who)} ended{_cause(ends[who])}"


def _cause(end: Future[None]) -> str:
    """Returns Ray's cause of death, as the end of a sentence; empty if the actor ended by itself, or Ray is late."""
    try:
        error = end.exception(_CAUSE_SECONDS)
    except FutureTimeout:
        return ""
    return "" if error is None or "INTENDED_USER_EXIT" in str(error) else describe_end(error)
