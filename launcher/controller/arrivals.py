"""Starts ranks that connect back to the controller, checks that each is expected, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from typing_extensions import override

from launcher import wire
from launcher.controller.group import Failure, RankProcess, serving
from launcher.controller.roles import make_components
from launcher.processes import limits
from launcher.processes.guards import StderrTail
from launcher.wire import Call, Hello, Setup
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, WorkerFailure
from rl_megatron.interfaces import Launcher, RunComponents, ignore_progress
from rl_megatron.placement.names import rank_label
from rl_megatron.placement.ranks import RankPlacement, ranks_by_role

logger = logging.getLogger(__name__)

_HELLO_BYTES = 4096
_STRANGERS = 64  # streams beyond one for each rank: few of the files that `limits` keeps for the controller


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRanks:
    """The ranks that a host started, and what starts them."""

    placements: Sequence[RankPlacement]  # one for each role with its own ranks, the learner's first
    ended: Awaitable[str]  # done once the program that starts the ranks has ended; returns how
    folder: Path  # has the ranks' output files, and without a store the files that ranks meet at
    output: str  # a sentence without its period: where the ranks' output is
    words: Mapping[tuple[str, int], StderrTail] = field(default_factory=dict)  # the stderr of ranks without files
    report_lost_nodes: Callable[[Sequence[str]], None] = lambda _: (
        None
    )  # a thread gives it nodes whose ranks died or never came
    cause: Callable[[str, int], str] = lambda *_: ""  # returns why a rank died, to end a sentence; called in a thread

    def where(self) -> dict[tuple[str, int], str]:
        """Returns the node of every rank of a role, in order."""
        return {
            (placement.role, rank): placement.rank_node(rank)
            for placement in self.placements
            for rank in range(placement.dims.world_size)
        }


class ConnectingLauncher(Launcher):
    """Starts ranks that connect back to this process. Each kind of host is a subclass."""

    def __init__(self, model_folder: Path, run_folder: Path, on_signal: Callable[[str], None] = lambda _: None) -> None:
        """``on_signal``: gets the name of a signal that a rank was sent."""
        self._model_folder, self._run_folder, self._on_signal = model_folder, run_folder, on_signal

    @abstractmethod
    async def _address(self) -> str:
        """Returns the address at which the ranks reach this process."""

    @abstractmethod
    def _threads(self, config: RunConfig) -> int:
        """Returns the number of CPU threads of a rank, if the configuration has none."""

    @abstractmethod
    def _begin(self, config: RunConfig, call: Call) -> AbstractAsyncContextManager[StartedRanks]:
        """Starts all ranks. Leaving the context ends what started them."""

    @override
    @contextlib.asynccontextmanager
    async def start(
        self, config: RunConfig, tell: Callable[[str], None] = ignore_progress
    ) -> AsyncIterator[RunComponents]:
        """Raises ConfigError if there is no room for the ranks that the roles need."""
        token, address = secrets.token_bytes(wire.TOKEN_BYTES), await self._address()
        with wire.listen(address, backlog=sum(ranks_by_role(config).values())) as listener:
            host, port = listener.getsockname()
            call = Call(
                host=host,
                port=port,
                token=token.hex(),
                seconds=config.learner.timeout_seconds,
                threads=config.learner.threads or self._threads(config),
                device=config.learner.device,
            )
            async with self._begin(config, call) as started:
                ranks = await arrivals(listener, call, started)
                listener.close()  # no other connection is expected
                failure = Failure()
                try:
                    async with serving(self._teams(config, started, ranks), failure, self._on_signal, tell) as groups:
                        yield make_components(groups, config)
                except WorkerFailure as error:
                    if failure.rank is None:
                        raise
                    who = failure.role, failure.rank
                    await asyncio.to_thread(started.report_lost_nodes, [started.where()[who]])
                    if cause := await asyncio.to_thread(started.cause, *who):
                        raise WorkerFailure(f"{error}{cause}") from error
                    raise

    def _teams(
        self, config: RunConfig, started: StartedRanks, ranks: Sequence[RankProcess]
    ) -> list[tuple[Setup, list[RankProcess]]]:
        teams = []
        taken: Counter[str] = Counter()  # accelerators in use, by node
        for placement in started.placements:
            role, team = placement.role, [rank for rank in ranks if rank.role == placement.role]
            store = team[0].hello.store
            setup = Setup(
                config=config.for_role(role),
                model_folder=self._model_folder.resolve(),
                run_folder=self._run_folder.resolve(),
                rendezvous=f"tcp://{store}" if store else f"file://{started.folder}/rendezvous-{role}",
                role=role,
                first_device=max(taken[node] for node in placement.nodes),
                ranks_per_node=placement.ranks_per_node,
            )
            teams.append((setup, team))
            taken.update(dict.fromkeys(placement.nodes, placement.ranks_per_node))
        return teams


async def arrivals(listener: socket.socket, call: Call, started: StartedRanks) -> list[RankProcess]:
    """Returns all ranks of all roles, in order. Raises WorkerFailure if some cannot connect, or do not in time, and
    ConfigError if this process may not have so many streams."""
    arrived: dict[tuple[str, int], RankProcess] = {}
    where = started.where()
    waiting = asyncio.ensure_future(_welcome(listener, bytes.fromhex(call.token), started, arrived))
    ended = asyncio.ensure_future(started.ended)
    try:
        if said := limits.problem_of_controller(len(where)):
            raise ConfigError(said)
        await asyncio.wait({waiting, ended}, timeout=call.seconds, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            ranks = [arrived[who] for who in where]
            _tell_of_plain_starts(ranks)
            return ranks
        missing = [who for who in where if who not in arrived]
        nodes = sorted({where[who] for who in missing})
        waiting.cancel()  # ranks that arrive now are too late
        await asyncio.to_thread(started.report_lost_nodes, nodes)
        why = ended.result() if ended.done() else f"learner.timeout_seconds={call.seconds:g} passed"
        raise WorkerFailure(f"{why} before {_named(missing, where)} connected; {started.output}")
    finally:
        for task in (waiting, ended):
            task.cancel()
        if not waiting.done() or waiting.cancelled() or waiting.exception():
            for rank in arrived.values():
                rank.kill()


def _tell_of_plain_starts(ranks: Sequence[RankProcess]) -> None:
    nodes: dict[str, dict[str, None]] = {}
    for rank in ranks:
        nodes.setdefault(rank.hello.hindered, {})[rank.hello.node] = None
    for why, where in nodes.items():
        if why:
            logger.warning("ranks on %s start slower, each with imports of its own: %s", ", ".join(where), why)


def _named(missing: Sequence[tuple[str, int]], where: Mapping[tuple[str, int], str]) -> str:
    """Returns ranks of roles, in order, by node: "rank 3, 4 on node1, critic rank 0-7 on node9"."""
    lists: dict[tuple[str, str], list[int]] = {}
    for role, rank in missing:
        lists.setdefault((role, where[role, rank]), []).append(rank)
    return ", ".join(f"{rank_label(role, _ranges(ranks))} on {node}" for (role, node), ranks in lists.items())


def _ranges(ranks: Sequence[int]) -> str:
    """Returns a text of rising numbers, three or more in a row as a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


async def _welcome(
    listener: socket.socket, token: bytes, started: StartedRanks, arrived: dict[tuple[str, int], RankProcess]
) -> None:
    """Accepts streams until every rank has one. Unproven streams delay no other: the oldest are closed for new ones."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    everybody, where = asyncio.Event(), started.where()
    unproven: dict[socket.socket, None] = {}  # the oldest first

    async def prove(accepted: socket.socket) -> None:
        try:
            try:
                connection = await wire.accept(accepted, token)
            finally:
                unproven.pop(accepted, None)
            rank = await _hear(connection, started)
        except (OSError, EOFError, ValueError, TypeError) as error:
            logger.warning("a stream was refused: %s", error)
            return
        who = (rank.role, rank.rank)
        if who in arrived or where.get(who) != rank.hello.node:
            logger.warning("%s connected twice or from another node than planned: %s", rank_label(*who), rank.hello)
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
            await asyncio.sleep(0)  # sock_accept runs no other task while connections keep coming

    tasks = {asyncio.create_task(accept())}
    try:
        await everybody.wait()
    finally:
        for task in tasks:
            task.cancel()


async def _hear(connection: Connection, started: StartedRanks) -> RankProcess:
    """Returns the rank of a proven stream, once its greeting is there: one packet, so that reading does not wait."""
    loop, greets = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), greets.set)
    try:
        await greets.wait()
    finally:
        loop.remove_reader(connection.fileno())
    hello = Hello(**json.loads(connection.recv_bytes(_HELLO_BYTES)))
    return RankProcess(connection, hello, started.words.get((hello.role, hello.rank), started.folder))
