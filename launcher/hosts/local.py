"""Starts a run's ranks on this machine: one process per learner rank, with its shard and an engine replica. Every rank
of another role with its own ranks is one process, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

from typing_extensions import override

from launcher.controller.arrivals import ConnectingLauncher, StartedRanks
from launcher.processes.environment import threads_per_worker, variables
from launcher.processes.guards import HERE, StderrTail
from launcher.processes.own_thread import run_in_own_thread
from launcher.processes.scratch import scratch
from launcher.wire import Call, Muster, this_node
from launcher.worker.forking import BLOCKED_SIGNALS
from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import rank_label
from rl_megatron.placement.ranks import RankPlacement, ranks_by_role

_PROGRAM = ("-P", "-m", "launcher.worker.node")


class LocalLauncher(ConnectingLauncher):
    """Starts the workers of a run on this machine, which one child of this process forks. Their signals are ignored:
    a terminal sends them to this process, too."""

    @override
    async def _address(self) -> str:
        return HERE

    @override
    def _threads(self, config: RunConfig) -> int:
        return threads_per_worker(config)

    @override
    @contextlib.asynccontextmanager
    async def _begin(self, config: RunConfig, call: Call) -> AsyncIterator[StartedRanks]:
        node, counts = this_node(), ranks_by_role(config)
        placements = [
            RankPlacement(dims=config.role_learner(role).dims, nodes=(node,), ranks_per_node=count, role=role)
            for role, count in counts.items()
        ]
        words = {(role, rank): StderrTail(rank_label(role, rank)) for role, n in counts.items() for rank in range(n)}
        muster = Muster(
            call=replace(call, store=False),
            nodes=(node,),
            ranks_per_node=counts,
            parent=os.getpid(),
            stderr=[words.theirs.fileno() for words in words.values()],
        )
        with scratch() as folder:
            process = start_node(muster)
            ended = asyncio.ensure_future(run_in_own_thread("node", process.wait))
            for each in words.values():
                each.listen()
            try:
                yield StartedRanks(
                    placements=placements,
                    ended=_end(ended),
                    folder=folder,
                    output="their output is above; if files are slow, raise learner.timeout_seconds",
                    words=words,
                )
            finally:
                process.kill()
                await asyncio.wait({ended})
                await asyncio.gather(*(each.tail() for each in words.values()))  # no rank is left


def start_node(muster: Muster) -> subprocess.Popen[bytes]:
    """Starts worker/node.py as a child of this process, which has threads, so that no fork of it would be sound.

    It ignores SIGINT and SIGTERM, which a terminal sends to every process of a run.
    """
    environment = {**os.environ, **variables(threads=muster.call.threads, device=muster.call.device)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        process = subprocess.Popen(
            [sys.executable, *_PROGRAM], stdin=subprocess.PIPE, env=environment, pass_fds=muster.stderr
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it has ended, which is seen
        stdin.write(muster.line())
    return process


async def _end(ended: asyncio.Future[int]) -> str:
    return f"the process that forks the ranks ended with status {await asyncio.shield(ended)}"
