"""Starts learner ranks as actors (actors.py) of a Ray cluster (cluster.py).

Like every rank, an actor connects back to the controller with the run's token.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from launcher.controller.arrivals import Awaited, learner
from launcher.controller.handle import Failure, seen
from launcher.hosts.ray.cluster import RayCluster, group_of
from launcher.hosts.ray.head import said
from launcher.hosts.ray.node import Bundle
from launcher.hosts.threads import threads_per_rank, threads_per_worker
from launcher.wire import channel
from launcher.wire.greetings import Call
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import WorkerDied
from rl_megatron.interfaces import Launcher, Roles, unheard
from rl_megatron.placement.names import called, file_stem
from rl_megatron.placement.ranks import ranks_by_role

# isort: split
import ray  # after head, which sets what it reads
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.hosts.ray.actors import RankActor

Who = tuple[str, int]
"""A role, and the number of one of its ranks."""

_CAUSE_SECONDS = 20.0


class RayLauncher(Launcher):
    """Starts the workers of a run as actors of a running cluster."""

    def __init__(
        self, cluster: RayCluster, model_folder: Path, run_folder: Path, on_signal: Callable[[str], None]
    ) -> None:
        self._cluster, self._model_folder, self._run_folder = cluster, model_folder, run_folder
        self._on_signal = on_signal

    @override
    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig, tell: Callable[[str], None] = unheard) -> AsyncIterator[Roles]:
        cluster, allocation = self._cluster, self._cluster.allocation
        (placement, *separate), folder = cluster.placements, cluster.folder
        token, failure = secrets.token_bytes(channel.TOKEN_BYTES), Failure()
        with channel.listen(cluster.host, backlog=sum(ranks_by_role(config).values())) as listener:
            threads = threads_per_rank(placement) if allocation else threads_per_worker(config)
            threads = config.learner.threads or threads
            call = Call(
                host=cluster.host,
                port=listener.getsockname()[1],
                token=token.hex(),
                seconds=config.learner.timeout_seconds,
                threads=threads,
                device=config.learner.device,
            )
            ends: dict[Who, Future[None]] = {}
            for role, bundles in cluster.shares.ranks.items():
                ends |= await cluster.place(_start_ranks, bundles, replace(call, role=role), folder)
            awaited = Awaited(
                placement=placement,
                separate=separate,
                token=token,
                started=_first_end(ends),
                seconds=config.learner.timeout_seconds,
                folder=folder,
                files=f"{', '.join(file_stem(role, '*') for role in cluster.shares.ranks)}.txt",
                blame=allocation.blame if allocation else lambda _: None,
            )
            try:
                async with learner(
                    listener,
                    awaited,
                    failure,
                    config,
                    model_folder=self._model_folder,
                    run_folder=self._run_folder,
                    on_signal=self._on_signal,
                    tell=tell,
                ) as roles:
                    yield roles
            except WorkerDied as error:
                if failure.rank is None:
                    raise
                cause = await asyncio.to_thread(_cause, ends[failure.role, failure.rank])
                raise WorkerDied(f"{error}{cause}") from error


def _start_ranks(bundles: Mapping[str, Sequence[Bundle]], call: Call, folder: Path) -> dict[Who, Future[None]]:
    """Start an actor for each rank, in its node's placement group. Returns a future of each one's end."""
    actor: Any = ray.remote(RankActor)
    ends: dict[Who, Future[None]] = {}
    for node, each in bundles.items():
        group = group_of(call.role, node, each)
        for index in range(len(each)):
            number = len(ends)
            here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            made = actor.options(num_cpus=1, scheduling_strategy=here, name=called(call.role, number)).remote()
            log = str(folder / f"{file_stem(call.role, number)}.txt")
            ends[call.role, number] = made.serve.remote(call, number, log).future()
    return ends


async def _first_end(ends: Mapping[Who, Future[None]]) -> str:
    """How the first actor ended, once one has."""
    waiting = {who: asyncio.wrap_future(end) for who, end in ends.items()}
    for one in waiting.values():
        one.add_done_callback(seen)
    await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
    who = next(who for who, one in waiting.items() if one.done())
    return f"the actor of {called(*who)} ended{_cause(ends[who])}"


def _cause(end: Future[None]) -> str:
    """Ray's cause of death, as the end of a sentence; empty if the actor ended by itself, or Ray is late."""
    try:
        error = end.exception(_CAUSE_SECONDS)
    except FutureTimeout:
        return ""
    return "" if error is None or "INTENDED_USER_EXIT" in str(error) else said(error)
