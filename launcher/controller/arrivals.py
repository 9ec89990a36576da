"""Accepts the ranks that connect back to the controller, checks that each is expected, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from typing_extensions import override

from launcher.controller.group import serving
from launcher.controller.handle import Ending, Failure, RankProcess
from launcher.controller.roles import roles_of
from launcher.processes import limits
from launcher.processes.guards import end_of
from launcher.processes.own_thread import OwnThread
from launcher.wire import channel
from launcher.wire.greetings import Hello, Setup
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, WorkerDied
from rl_megatron.interfaces import Roles
from rl_megatron.placement.names import called, file_stem
from rl_megatron.placement.ranks import Placement

logger = logging.getLogger(__name__)

_HELLO_BYTES = 4096
_STRANGERS = 64  # streams beyond one for each rank: few of the files that `limits` keeps for the controller
_WAKE_SECONDS = 10.0  # of scancel, whose server may be away
_TAIL_SECONDS = 0.5  # to read the end of a dead rank's output


class ConnectedRank(RankProcess):
    """A rank that connected from its node."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.connection, self.role, self.rank, self.hello = connection, hello.role, hello.rank, hello
        self.node, self.pid, self.where = hello.node, hello.pid, f"pid {hello.pid} on {hello.node}"
        self.folder: Path | None = None  # of its output file

    @override
    def over(self, hung_up: asyncio.Future[None]) -> asyncio.Future[Any]:
        """The end of the stream is the only sign from another node."""
        return hung_up

    @override
    async def ending(self) -> Ending:
        """Says it soon, whatever its output's disk does: peers blame each other after a second."""
        file, tail = file_stem(self.role, self.rank), ""
        if self.folder is not None:
            with contextlib.suppress(TimeoutError):
                tail = await asyncio.wait_for(_files()(end_of, self.folder / f"{file}.txt"), _TAIL_SECONDS)
        said = f"ends with:{tail}" if tail else "has its output"
        how = f"hung up: it was killed, crashed or lost its node; {file}.txt {said}"
        return Ending(how=how, expected=True, killed=True)

    @override
    async def wake(self) -> None:
        """Has Slurm send SIGCONT to all ranks of the step. Without Slurm nothing can wake a stopped rank."""
        if not all(self.hello.step.split(".")):
            return
        command, given = ["scancel", "--signal=CONT", self.hello.step], dict(os.environ)
        try:
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, env=given, timeout=_WAKE_SECONDS
            )
            why = f"scancel: status {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            rank = called(self.role, self.rank)
            logger.warning("%s on %s was not continued, if it was stopped: %s", rank, self.node, why)

    @override
    def kill(self) -> None:
        """Closes the stream, upon which the rank ends within seconds."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as stream:
            stream.shutdown(socket.SHUT_RDWR)  # unless it hung up first


@cache
def _files() -> OwnThread:
    """Reads the ends of ranks' output: their disk may never answer."""
    return OwnThread("output of ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """The ranks that were started, and what starts them."""

    placement: Placement
    token: bytes
    started: Awaitable[str]  # done once what starts the ranks has ended; says how
    seconds: float
    folder: Path  # of the ranks' output files
    files: str  # the names of these files, for messages
    blame: Callable[[Sequence[str]], None]  # called in a thread, with the nodes whose ranks did not connect, or died
    separate: Sequence[Placement] = ()  # of other roles with their own ranks

    @property
    def placements(self) -> dict[str, Placement]:
        """The placements by role, the learner's first."""
        return {placement.role: placement for placement in (self.placement, *self.separate)}

    def where(self) -> dict[tuple[str, int], str]:
        """The node of every rank of a role, in order."""
        return {
            (role, rank): placement.node_of(rank)
            for role, placement in self.placements.items()
            for rank in range(placement.dims.world_size)
        }


@contextlib.asynccontextmanager
async def learner(
    listener: socket.socket,
    awaited: Awaited,
    failure: Failure,
    config: RunConfig,
    *,
    model_folder: Path,
    run_folder: Path,
    on_signal: Callable[[str], None],
    tell: Callable[[str], None],
) -> AsyncIterator[Roles]:
    """Wait for all ranks and yield their roles. Raises WorkerDied, after blaming the rank's node."""
    ranks = await arrivals(listener, awaited)
    listener.close()  # no other connection is expected
    teams: list[tuple[Setup, list[ConnectedRank]]] = []
    taken: Counter[str] = Counter()  # accelerators in use, by node
    for role, placement in awaited.placements.items():
        team = [rank for rank in ranks if rank.role == role]
        for rank in team:
            rank.folder = awaited.folder
        setup = Setup(
            config=config.of_role(role),
            model_folder=model_folder.resolve(),
            run_folder=run_folder.resolve(),
            rendezvous=f"tcp://{team[0].hello.store}",
            role=role,
            first_device=max(taken[node] for node in placement.nodes),
            ranks_per_node=placement.ranks_per_node,
        )
        teams.append((setup, team))
        taken.update(dict.fromkeys(placement.nodes, placement.ranks_per_node))
    try:
        async with serving(teams, failure, on_signal, tell) as groups:
            yield roles_of(groups, config)
    except WorkerDied:
        if failure.rank is not None:
            await asyncio.to_thread(awaited.blame, [awaited.where()[failure.role, failure.rank]])
        raise


async def arrivals(listener: socket.socket, awaited: Awaited) -> list[ConnectedRank]:
    """All ranks of all roles, in order. Raises WorkerDied if some cannot connect, or do not in time, and ConfigError if
    this process may not have so many streams."""
    arrived: dict[tuple[str, int], ConnectedRank] = {}
    where = awaited.where()
    waiting = asyncio.ensure_future(_welcome(listener, awaited, arrived))
    ended = asyncio.ensure_future(awaited.started)
    try:
        if said := limits.problem_of_files(len(where), here=False):
            raise ConfigError(said)
        await asyncio.wait({waiting, ended}, timeout=awaited.seconds, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            ranks = [arrived[who] for who in where]
            _tell_of_plain_starts(ranks)
            return ranks
        missing = [who for who in where if who not in arrived]
        nodes = sorted({where[who] for who in missing})
        waiting.cancel()  # who arrives now is too late
        await asyncio.to_thread(awaited.blame, nodes)
        why = ended.result() if ended.done() else f"learner.timeout_seconds={awaited.seconds:g} passed"
        raise WorkerDied(
            f"{why} before {_named(missing, where)} connected; {awaited.files} in {awaited.folder} have their output"
        )
    finally:
        for task in (waiting, ended):
            task.cancel()
        if not waiting.done() or waiting.cancelled() or waiting.exception():
            for rank in arrived.values():
                rank.kill()


def _tell_of_plain_starts(ranks: Sequence[ConnectedRank]) -> None:
    nodes: dict[str, dict[str, None]] = {}
    for rank in ranks:
        nodes.setdefault(rank.hello.hindered, {})[rank.hello.node] = None
    for why, where in nodes.items():
        if why:
            logger.warning("ranks on %s start slower, each with imports of its own: %s", ", ".join(where), why)


def _named(missing: Sequence[tuple[str, int]], where: Mapping[tuple[str, int], str]) -> str:
    """Ranks of roles, in order, by node: "rank 3, 4 on node1, critic rank 0-7 on node9"."""
    lists: dict[tuple[str, str], list[int]] = {}
    for role, rank in missing:
        lists.setdefault((role, where[role, rank]), []).append(rank)
    return ", ".join(f"{called(role, _ranges(ranks))} on {node}" for (role, node), ranks in lists.items())


def _ranges(ranks: Sequence[int]) -> str:
    """Rising numbers, three or more in a row as a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


async def _welcome(listener: socket.socket, awaited: Awaited, arrived: dict[tuple[str, int], ConnectedRank]) -> None:
    """Accept streams until every rank has one. Those that prove nothing delay no other: the oldest make room."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    everybody, where = asyncio.Event(), awaited.where()
    unproven: dict[socket.socket, None] = {}  # the oldest first

    async def prove(accepted: socket.socket) -> None:
        try:
            try:
                connection = await channel.accept(accepted, awaited.token)
            finally:
                unproven.pop(accepted, None)
            rank = await _hear(connection)
        except (OSError, EOFError, ValueError, TypeError) as error:
            logger.warning("a stream was refused: %s", error)
            return
        who = (rank.role, rank.rank)
        if who in arrived or where.get(who) != rank.hello.node:
            logger.warning("%s connected twice or from another node than planned: %s", called(*who), rank.hello)
            rank.kill()
            return
        arrived[who] = rank
        if len(arrived) == len(where):
            everybody.set()

    async def accept() -> None:
        while True:
            accepted, _ = await loop.sock_accept(listener)
            unproven[accepted] = None
            task = asyncio.create_task(prove(accepted))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if len(arrived) + len(unproven) > len(where) + _STRANGERS:
                oldest = next(iter(unproven))
                del unproven[oldest]
                with contextlib.suppress(OSError):  # unless it hung up first
                    oldest.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(0)  # sock_accept lets nobody else run while strangers keep coming

    tasks = {asyncio.create_task(accept())}
    try:
        await everybody.wait()
    finally:
        for task in tasks:
            task.cancel()


async def _hear(connection: Connection) -> ConnectedRank:
    """The rank that has proved itself, once it greets: in one packet, so that reading it does not wait."""
    loop, greets = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), greets.set)
    try:
        await greets.wait()
    finally:
        loop.remove_reader(connection.fileno())
    return ConnectedRank(connection, Hello(**json.loads(connection.recv_bytes(_HELLO_BYTES))))
