"""Makes replicas load, report, score and commit weight versions, so that all serve the same one."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.engines.adapter import Adapter
from rl_megatron.engines.http import AttemptFailed, Server, TooManyOpenFiles
from rl_megatron.engines.replicas import HEALTH_SECONDS, PRESENT, Event, Health, Replica, ReplicaSet
from rl_megatron.engines.requests import RequestRetrier
from rl_megatron.errors import AllReplicasLost, EngineError, SyncError
from rl_megatron.types import Completion, GenerationRequest, NamedVersion
from rl_megatron.weights.checks.compare import ServerComparisons
from rl_megatron.weights.checks.reports import NO_KINDS, ChecksumReport, Kinds
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.routes.mirror import shapes

T = TypeVar("T")

_GRACE_SECONDS = 2.0  # seconds: a dying server fails its last requests before its end is known


class ReplicaWeights:
    """Serves a version from ``commit`` on. Between ``load`` and ``commit`` it serves nothing."""

    def __init__(
        self, adapter: Adapter, replicas: ReplicaSet, section: ServerSection, attempts: RequestRetrier
    ) -> None:
        self._adapter, self._replicas, self._section, self._attempts = adapter, replicas, section, attempts
        self._holding: dict[Replica, Server] = {}  # the servers that loaded the latest weights
        self._version: int | None = None
        self.paused_seconds = 0.0
        """The longest time that the last push to all servers paused the sampling of one."""
        self._released, self._releasing = False, asyncio.Lock()
        self.refitting = asyncio.Lock()  # held while a returning server is refitted: its memory is not released
        self._turn = asyncio.Event()  # set while the GPUs are in use by servers, not by the learner
        self._turn.set()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def updating(self) -> bool:
        """True during a push and while memory is released: servers may be paused then."""
        return self._released or not self._settled.is_set()

    @property
    def version(self) -> int | None:
        """The served version, or None during a push and before the first."""
        return self._version

    async def wait_for_memory(self) -> None:
        """Waits until a server can start. With ``rollout.server.colocated`` that is when the next push has returned
        memory to answering servers, or begins if no server answers. A starting server would otherwise count memory
        that others allocate as its own. `release` waits for a server that has started before.
        """
        while self._shares_gpus and not (self._turn.is_set() and self._replicas.all_have_memory()):
            await (self._replicas.change() if self._turn.is_set() else self._turn.wait())

    @property
    def _shares_gpus(self) -> bool:
        """True if servers that this run starts share the learner's GPUs in turns."""
        return self._section.colocated and self._section.addresses is None

    async def served_version(self, request: GenerationRequest) -> int:
        """Waits for the end of an update. Returns the served version. Raises EngineError if there is none."""
        await self._settled.wait()
        if self._version is None:
            raise EngineError(f"request {request.id!r}: no weights are served; push some first")
        return self._version

    def stale(self, url: str) -> bool:
        """True if the server at ``url`` answers but does not serve, and memory is not released."""
        return not self._released and any(r.health is Health.STALE and r.server.url == url for r in self._replicas.all)

    def names(self) -> list[str]:
        """Returns the URLs of the replicas that answer."""
        return [replica.server.url for replica in self._replicas.present()]

    async def boxes(self, path: Path) -> dict[str, list[Boxes]]:
        """Returns URL -> boxes of the mirror file's tensors that each rank of the replica holds. Raises SyncError.

        Released weights get their memory again: an engine's loader may compute with the tensors during recording.
        """
        self._turn.set()

        async def one(server: Server) -> list[Boxes]:
            await self._reclaim_weights(server)
            return await self._adapter.boxes(server, path)

        present = {replica: replica.server for replica in await self._replicas.wait_for_healthy(self._replicas.present)}
        return await self.call_each(present, "recording layouts", lambda r: one(r.server))

    async def _reclaim_weights(self, server: Server) -> None:
        """Allocates released weights again, once."""
        if server.released and not server.reclaimed:
            await self._adapter.resume_memory(server, "weights")
            server.reclaimed = True

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        """Joins the replicas' ranks to a process group. ``first``: URL -> its first rank there. Raises SyncError."""
        wanted = {r: r.server for r in self._replicas.present() if r.server.url in first}
        await self.call_each(
            wanted, "joining a group", lambda r: self._adapter.join(r.server, path, rendezvous, first[r.server.url])
        )

    async def load(
        self,
        path: Path,
        version: int,
        *,
        only: str | None = None,
        straight: Collection[str] = (),
        private: Kinds = NO_KINDS,
    ) -> dict[str, list[ChecksumReport]]:
        """Makes every replica that answers load ``version``. Nothing is served after that. Returns the ranks' reports.

        ``only``: only the replica at that URL loads, and others still serve. ``straight``: the replicas at these URLs
        receive it over the group that they joined. Reports omit ``private`` kinds, by URL. Raises SyncError, and
        AllReplicasLost if all died: requests wait until another ``load`` is committed, or `refuse`.
        """
        if only is None:
            self._turn.set()
            self._settled.clear()
            self._version, self.paused_seconds = None, 0.0

        clock = asyncio.get_running_loop()

        async def one(server: Server) -> list[ChecksumReport]:
            server.paused, began, mode = True, clock.time(), self._section.running_requests
            if mode == "recompute" and any(hooks.resends and hooks.given(server) for hooks in self._adapter.hooks):
                mode = "abort"
            try:
                await self._adapter.pause(server, mode)
                for hooks in self._adapter.hooks:
                    await hooks.paused(server)
                # From now on, requests wait for the new weights. Another run may have cached by this version.
                server.salt = f"{version}-{uuid.uuid4().hex}" if mode == "keep_cache" else None
                await self._reclaim_weights(server)
                kinds = private.get(server.url, frozenset())
                reports = await self._adapter.load(server, path, version, private=kinds, straight=bool(straight))
                if server.released:
                    await self._adapter.resume_memory(server, "cache")
                    server.released = server.reclaimed = False
                await self._adapter.resume(server)
                if only is None:
                    self.paused_seconds = clock.time() - began  # all began together: the time of the last
            finally:
                server.paused = False  # also after a failure, when nothing resumes the server
            return reports

        try:
            present = (
                self._replicas.present() if only else await self._replicas.wait_for_healthy(self._replicas.present)
            )
            wanted = {only} if only else straight or {replica.server.url for replica in present}
            holding = {replica: replica.server for replica in present if replica.server.url in wanted}
            reports = await self.call_each(holding, f"version {version}", lambda replica: one(replica.server))
        except BaseException as error:
            if only is None and not isinstance(error, AllReplicasLost):  # else it is loaded again, and requests wait
                self._settled.set()
            raise
        self._holding = holding if only is None else self._holding | holding
        self._released = self._released and only is not None
        return reports

    async def sample_on_all(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> dict[str, list[list[Completion]]]:
        """Returns URL -> completions by each loaded replica, or by ``only``."""

        async def run_all(replica: Replica) -> list[list[Completion]]:
            return list(await asyncio.gather(*(self._attempts.sample(r, replica) for r in requests)))

        return await self.call_each(self.loaded(only), "a probe of new weights", run_all)

    async def score_on_all(
        self, texts: Sequence[Sequence[int]], *, only: str | None = None, named: NamedVersion | None = None
    ) -> dict[str, list[list[float]]]:
        """Returns URL -> log-probs of each text's tokens after the first, with the weights or those ``named``."""
        more = () if named is None else (named,)

        async def run_all(replica: Replica) -> list[list[float]]:
            with replica.server.busy():
                return list(await asyncio.gather(*(self._adapter.score(replica.server, text, *more) for text in texts)))

        return await self.call_each(self.loaded(only), "a probe of new weights", run_all)

    async def comparable(self, path: Path, checksums: Mapping[str, int]) -> dict[str, tuple[int, list[str]]]:
        """Returns URL -> (number of the mirror's tensors with checksums, names that differ). Raises SyncError."""
        said = await self.call_each(
            self.loaded(None), "comparing weights", lambda r: self._adapter.rank_reports(r.server, path)
        )
        known, checks = shapes(path), ServerComparisons()
        found = {url: await asyncio.to_thread(checks.find, url, checksums, known, said[url]) for url in said}
        return {url: (len(known) - len(one.unchecked), sorted(one.differing)) for url, one in found.items()}

    async def commit(self, version: int, *, only: str | None = None) -> None:
        """Serves the loaded weights as ``version``. With ``only``, that replica joins the others."""
        await self.label(version, only=only)
        self.serve(version, only=only)

    async def label(self, version: int, *, only: str | None = None) -> None:
        """Makes servers label the loaded weights as ``version``, without serving them."""
        loaded = self.loaded(only)
        await self.call_each(loaded, f"version {version}", lambda r: self._adapter.relabel(r.server, version))

    def serve(self, version: int, *, only: str | None = None) -> None:
        """Makes replicas that hold the loaded weights serve ``version`` (these weights, or others that they have)."""
        for replica in self.loaded(only):
            replica.apply(Event.REFITTED)
        if only is None:
            self._version = version
            self._settled.set()

    async def release(self) -> None:
        """Releases the servers' memory for training. Nothing is served until the next ``load`` is committed.

        No request may run. Does nothing if the memory is released, except for servers restarted since. Concurrent
        callers wait for the same release. It waits for servers that are being restarted, and none restarts from now on
        (`wait_for_memory`). It also waits until the processes of dead servers have ended.
        """
        self._released, self._version = True, None
        self._turn.clear()
        if self._shares_gpus:
            await self._replicas.wait_until_idle()

        async def one(replica: Replica) -> None:
            async with replica.server.checked:
                if not replica.server.released:
                    await self._adapter.release_memory(replica.server)
                    replica.server.released = True

        async with self.refitting, self._releasing:
            present = {replica: replica.server for replica in self._replicas.present()}
            with contextlib.suppress(AllReplicasLost):  # dead servers, with their processes ended, hold no memory
                await self.call_each(present, "releasing memory", one)

    async def is_served_anywhere(self) -> None:
        """Waits until a replica serves. Raises EngineError if none will."""
        await self._replicas.wait_for_healthy(self._replicas.healthy)

    def refuse(self) -> None:
        """Serves nothing until another ``load`` is committed. Waiting requests fail."""
        self._settled.set()

    def loaded(self, only: str | None) -> dict[Replica, Server]:
        """Returns the replicas that hold the last loaded weights, or ``only``. Servers restarted since do not."""
        return {
            replica: server
            for replica, server in self._holding.items()
            if replica.server is server and replica.health in PRESENT and only in (None, server.url)
        }

    async def call_each(
        self, replicas: Mapping[Replica, Server], what: str, order: Callable[[Replica], Coroutine[Any, Any, T]]
    ) -> dict[str, T]:
        """Applies ``order`` to all replicas concurrently, and omits those that die before it ends.

        Raises SyncError that names the replicas on which it failed, AllReplicasLost if all died, TooManyOpenFiles.
        """
        answers = await asyncio.gather(*(r.cancel_on_death(order(r)) for r in replicas), return_exceptions=True)
        for (replica, server), answer in zip(replicas.items(), answers, strict=True):
            if isinstance(answer, AttemptFailed) and replica.server is server:  # not its successor
                replica.suspect(answer)
        if any(isinstance(a, AttemptFailed) for a in answers):
            await self._wait_for_exits()
        done: dict[str, T] = {}
        problems = []
        for (replica, server), answer in zip(replicas.items(), answers, strict=True):
            if not isinstance(answer, BaseException):
                done[server.url] = answer
            elif isinstance(answer, TooManyOpenFiles) or not isinstance(
                answer, AttemptFailed | EngineError | SyncError
            ):
                raise answer
            elif replica.health in PRESENT and replica.server is server:
                problems.append(f"{server.url}: {answer}")
        if problems:
            raise SyncError("\n  ".join([f"{what} failed, and is not served:", *problems]))
        if not done:
            ends = dict.fromkeys(f"{replica.reason}" for replica in self._replicas.all)
            raise AllReplicasLost("\n  ".join([f"{what} failed, and is not served:", *ends]))
        return done

    async def _wait_for_exits(self) -> None:
        """Waits until it is known which failed servers have died. On a busy machine that may take long."""
        await asyncio.sleep(_GRACE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_SECONDS):
                await self._replicas.wait_for_suspects()
