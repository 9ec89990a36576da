"""Engine servers as one RolloutEngine: replicas, retries, and new weights served only once they are verified.

An adapter (adapter.py) says a request or an order in its server's words; everything else is here, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import EngineError, ReplicasLost, SyncError
from rl_megatron.rollout.servers.adapter import Adapter, ForeignWeights
from rl_megatron.rollout.servers.answers import as_it_should_end, joined, problem_of, rest_of
from rl_megatron.rollout.servers.http import AttemptFailed, Server
from rl_megatron.rollout.servers.replicas import PRESENT, Event, Health, Replica, ReplicaDied, ReplicaSet
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.checks.compare import count_verified
from rl_megatron.weights.checks.reports import NO_KINDS, Kinds, Report
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.servers.mirror import shapes

logger = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_SECONDS = 2.0  # a server that dies fails its last requests before its end is known


class ServedEngine:
    """A RolloutEngine over servers. Weights are served from ``commit`` on, and by nobody after ``load`` until then.

    ``load`` and ``commit`` belong to the weight sync. Requests that run meanwhile wait in the engine and go on with the
    new weights, or are ended and asked again with what they have (``running_requests``); their answers are held back
    until these are committed. A request whose replica dies goes to another, or waits for one. A prompt and its
    completion have at most ``max_length`` tokens, of ids below ``vocab_size``: what else a server would cut short, or
    die of, is refused here.
    """

    def __init__(
        self, adapter: Adapter, servers: Sequence[Server], section: ServerSection, *, max_length: int, vocab_size: int
    ) -> None:
        self.adapter, self._section = adapter, section
        self.replicas = ReplicaSet(adapter.name, servers)
        self._holding: dict[Replica, Server] = {}  # who holds the weights that were loaded last
        self._max_length, self._vocab_size = max_length, vocab_size
        self._slots = asyncio.Semaphore(section.concurrency)
        self._version: int | None = None
        self._released, self._releasing = False, asyncio.Lock()
        self._aborts: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def servers(self) -> list[Server]:
        """Those that answer."""
        return [replica.server for replica in self.replicas.present()]

    @property
    def updating(self) -> bool:
        """Whether new weights are under way or memory is given back, so that servers may be at a pause."""
        return self._released or not self._settled.is_set()

    def metrics(self) -> dict[str, int]:
        """How the replicas are."""
        restarts = sum(replica.restarts for replica in self.replicas.all)
        return {"engine/healthy": len(self.replicas.healthy()), "engine/restarts": restarts}

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Completions whose versions were all served while they were sampled. Raises EngineError."""
        if not request.num_completions:
            return []
        self._check(request)
        async with self._slots:
            before = await self._served_version(request)
            started = await self._sampled(request)
            completions = await asyncio.gather(*(self._finished(request, c, before) for c in started))
            after = await self._served_version(request)
        if len(completions) != request.num_completions:
            raise EngineError(
                f"request {request.id!r}: {len(completions)} completions came, {request.num_completions} were asked for"
            )
        strays = {s.version for c in completions for s in c.spans if not before <= s.version <= after}
        if strays:
            raise EngineError(
                f"request {request.id!r} was sampled with version {min(strays)}, but {before} to {after} were served: "
                "was a server started again, or fed by another run?"
            )
        return completions

    def _check(self, request: GenerationRequest) -> None:
        prompt, new = request.token_ids, request.params.max_new_tokens
        if not prompt or min(prompt) < 0 or max(prompt) >= self._vocab_size:
            problem = f"the prompt must have one or more token ids in [0, {self._vocab_size}), got {prompt[:8]}..."
        elif len(prompt) + new > self._max_length:
            problem = (
                f"{len(prompt)} prompt tokens + max_new_tokens={new} exceed the engine's "
                f"max_length={self._max_length}; shorten the prompt or lower max_new_tokens"
            )
        else:
            return
        raise EngineError(f"request {request.id!r}: {problem}")

    async def _served_version(self, request: GenerationRequest) -> int:
        """The version that is served, once no update is under way."""
        await self._settled.wait()
        if self._version is None:
            raise EngineError(f"request {request.id!r}: no weights are served; push some first")
        return self._version

    async def _finished(self, request: GenerationRequest, completion: Completion, version: int) -> Completion:
        """The completion, with what newer weights sampled of it where an update ended it.

        Raises EngineError where the server ended it though no update was under way since ``version`` was served.
        """
        while (completion := as_it_should_end(completion, request)).finish_reason == "abort":
            served = await self._served_version(request)
            if served == version:
                raise EngineError(
                    f"request {request.id!r}: the server ended it after {len(completion.token_ids)} tokens, though "
                    f"weights of version {served} were served all the time: did another client abort or pause?"
                )
            version = served
            (more,) = await self._sampled(rest_of(request, completion))
            completion = joined(completion, more)
        return completion

    async def _least_busy(self, failed: Replica | None) -> Replica:
        """Another than ``failed`` where there is one."""
        healthy = await self.replicas.some(self.replicas.healthy)
        return min(healthy, key=lambda replica: (replica is failed, replica.server.in_flight))

    async def _sampled(self, request: GenerationRequest, only: Replica | None = None) -> list[Completion]:
        """Completions by the least busy replica, or by ``only``, which may die of it. Deaths are no failed attempts."""
        wait, failed, left = self._section.backoff_seconds, None, self._section.retries
        while True:
            replica = only or await self._least_busy(failed)
            server = replica.server
            name = f"{request.id} {uuid.uuid4().hex}"
            try:
                with server.busy():
                    completions = await replica.while_alive(self.adapter.generate(server, request, name))
                for completion in completions:
                    if problem := problem_of(completion, request, vocab_size=self._vocab_size):
                        raise AttemptFailed(f"{server.url}: {problem}")
                return completions
            except asyncio.CancelledError:
                self._abort(server, request, name)
                raise
            except ReplicaDied as error:
                if only is not None:
                    raise
                logger.warning("request %r is made again: %s", request.id, error)
                continue
            except (AttemptFailed, ForeignWeights) as error:
                replica.suspect(error)
                if not left or (isinstance(error, ForeignWeights) and not replica.supervised):
                    tries = self._section.retries + 1 - left
                    raise EngineError(f"request {request.id!r}: {error}; attempts made: {tries}") from error
                logger.warning("request %r: %s; again in %g s", request.id, error, wait)
                failed = replica
            except EngineError as error:
                raise EngineError(f"request {request.id!r}: {error}") from error
            left -= 1
            await asyncio.sleep(wait)
            wait *= 2

    def _abort(self, server: Server, request: GenerationRequest, name: str) -> None:
        """Have the server end it: by itself it may look after closed connections every few seconds only."""

        async def send() -> None:
            with contextlib.suppress(AttemptFailed, EngineError):  # its end ends the request too
                await self.adapter.abort(server, request, name)

        task = asyncio.ensure_future(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def stale(self, url: str) -> bool:
        """Whether a server answers there that does not serve, and should."""
        return not self._released and any(r.health is Health.STALE and r.server.url == url for r in self.replicas.all)

    def names(self) -> list[str]:
        """URLs of those that answer."""
        return [server.url for server in self.servers]

    async def boxes(self, path: Path) -> dict[str, list[Boxes]]:
        """What each rank of each replica that answers holds of the mirror file's tensors; by URL. Raises SyncError."""
        present = {replica: replica.server for replica in await self.replicas.some(self.replicas.present)}
        return await self._on_each(present, "recording layouts", lambda r: self.adapter.boxes(r.server, path))

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        """Make the ranks of these replicas members of a group, each from its ``first`` on, by URL. Raises SyncError."""
        wanted = {r: r.server for r in self.replicas.present() if r.server.url in first}
        await self._on_each(
            wanted, "joining a group", lambda r: self.adapter.join(r.server, path, rendezvous, first[r.server.url])
        )

    async def load(
        self,
        path: Path,
        version: int,
        *,
        only: str | None = None,
        straight: Collection[str] = (),
        private: Kinds = NO_KINDS,
    ) -> dict[str, list[Report]]:
        """Every replica that answers holds ``version`` when this returns, and nothing is served; what ranks hold.

        ``only``: the one at that URL alone; the others serve on. ``straight``: those at these URLs, which have joined
        a group, take it from there. Ranks report no parameters of ``private`` kinds, by URL. Raises SyncError;
        ReplicasLost where all died.
        """
        if only is None:
            self._settled.clear()
            self._version = None

        async def one(server: Server) -> list[Report]:
            server.paused = True
            try:
                await self.adapter.pause(server, self._section.running_requests)
                if server.released:
                    await self.adapter.reclaim(server, "weights")
                kinds = private.get(server.url, frozenset())
                reports = await self.adapter.load(server, path, version, private=kinds, straight=bool(straight))
                if server.released:
                    await self.adapter.reclaim(server, "cache")
                    server.released = False
                await self.adapter.resume(server)
            finally:
                server.paused = False  # where this failed and nobody resumes it, it stands still
            return reports

        try:
            present = self.replicas.present() if only else await self.replicas.some(self.replicas.present)
            wanted = {only} if only else straight or {replica.server.url for replica in present}
            holding = {replica: replica.server for replica in present if replica.server.url in wanted}
            reports = await self._on_each(holding, f"version {version}", lambda replica: one(replica.server))
        except BaseException:
            if only is None:
                self._settled.set()
            raise
        self._holding = holding if only is None else self._holding | holding
        self._released = self._released and only is not None
        return reports

    async def sample_everywhere(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> dict[str, list[list[Completion]]]:
        """By each replica that was loaded, or by ``only``; by URL."""

        async def all_of(replica: Replica) -> list[list[Completion]]:
            return list(await asyncio.gather(*(self._sampled(r, replica) for r in requests)))

        return await self._on_each(self._loaded(only), "a probe of new weights", all_of)

    async def comparable(self, path: Path, checksums: Mapping[str, int]) -> dict[str, tuple[int, list[str]]]:
        """How many of the mirror's tensors checksums tell of, and those that differ; by URL. Raises SyncError."""
        what = "comparing weights"
        said = await self._on_each(self._loaded(None), what, lambda r: self.adapter.held(r.server, path))
        known = shapes(path)
        return {url: count_verified(checksums, known, reports) for url, reports in said.items()}

    async def tokenized(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...] | None:
        """What a replica's own tokenizer makes of a text; None where it has none. Raises EngineError."""
        server = next(iter(self._loaded(None).values()))
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        try:
            if "/tokenize" not in (await server.get("/openapi.json"))["paths"]:
                return None
            answer = await server.post("/tokenize", body)
        except AttemptFailed as error:
            raise EngineError(f"its tokenizer does not answer: {error}") from error
        return tuple(answer["tokens"])

    async def score_everywhere(
        self, texts: Sequence[Sequence[int]], *, only: str | None = None
    ) -> dict[str, list[list[float]]]:
        """Log-probs of each text's tokens but the first, likewise."""

        async def all_of(replica: Replica) -> list[list[float]]:
            with replica.server.busy():
                return list(await asyncio.gather(*(self.adapter.score(replica.server, text) for text in texts)))

        return await self._on_each(self._loaded(only), "a probe of new weights", all_of)

    async def commit(self, version: int, *, only: str | None = None) -> None:
        """Serve what ``load`` brought, as ``version``; with ``only``, by that replica too."""
        loaded = self._loaded(only)
        await self._on_each(loaded, f"version {version}", lambda r: self.adapter.relabel(r.server, version))
        for replica in self._loaded(only):
            replica.apply(Event.REFITTED)
        if only is None:
            self._version = version
            self._settled.set()

    async def release(self) -> None:
        """Give the servers' memory to who trains beside them. Nothing is served until the next ``load`` is committed.

        No request may run. Does nothing where it was given already, and where several ask at once all wait for it; one
        that came back since gives its own.
        """
        self._released, self._version = True, None

        async def one(replica: Replica) -> None:
            if not replica.server.released:
                await self.adapter.release(replica.server)
                replica.server.released = True

        present = {replica: replica.server for replica in self.replicas.present()}
        async with self._releasing:
            with contextlib.suppress(ReplicasLost):  # the dead hold none
                await self._on_each(present, "giving memory back", one)

    def refuse(self) -> None:
        """Serve nothing until another ``load`` is committed; requests that wait fail."""
        self._settled.set()

    def _loaded(self, only: str | None) -> dict[Replica, Server]:
        """Replicas that hold what was loaded last: the server that was, not one that stands in its place since."""
        return {
            replica: server
            for replica, server in self._holding.items()
            if replica.server is server and replica.health in PRESENT and only in (None, server.url)
        }

    async def _on_each(
        self, replicas: Mapping[Replica, Server], what: str, order: Callable[[Replica], Coroutine[Any, Any, T]]
    ) -> dict[str, T]:
        """``order`` on all at once; one that dies meanwhile is left out.

        Raises SyncError that names the replicas it failed on, ReplicasLost where all died.
        """
        answers = await asyncio.gather(*(r.while_alive(order(r)) for r in replicas), return_exceptions=True)
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, AttemptFailed):
                replica.suspect(answer)
        if any(isinstance(a, AttemptFailed) for a in answers):
            await asyncio.sleep(_GRACE_SECONDS)
        done: dict[str, T] = {}
        problems = []
        for (replica, server), answer in zip(replicas.items(), answers, strict=True):
            if not isinstance(answer, BaseException):
                done[server.url] = answer
            elif not isinstance(answer, AttemptFailed | EngineError | SyncError):
                raise answer
            elif replica.health in PRESENT and replica.server is server:
                problems.append(f"{server.url}: {answer}")
        if problems:
            raise SyncError("\n  ".join([f"{what} failed, and is not served:", *problems]))
        if not done:
            ends = dict.fromkeys(f"{replica.reason}" for replica in self.replicas.all)
            raise ReplicasLost("\n  ".join([f"{what} failed, and is not served:", *ends]))
        return done

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._aborts)
        await asyncio.gather(*(replica.server.close() for replica in self.replicas.all))
