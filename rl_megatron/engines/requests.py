"""Sends a request to one replica, and retries it on others until it is answered.

It chooses a replica that has the request's prefix in its cache, unless another is less busy. It decides when running
completions should move, and counts the slots of servers.

A prompt that was in flight on three servers as they were lost is dropped. A server is lost if it dies, if its
connection breaks, or if it answers a request with an error. That may fail all requests in flight there. So a prompt
with two losses is a *suspect*: a server has one suspect at a time, with all of its requests. The third loss drops the
prompt, and does not count for other prompts that were in flight at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl_megatron.engines.adapter import Adapter, UnknownWeights
from rl_megatron.engines.answers import completion_problem, continuation_request, join_continuation
from rl_megatron.engines.http import (
    AttemptFailed,
    ConnectionBroken,
    Server,
    ServerBusy,
    ServerRefusal,
    ServerUnreachable,
)
from rl_megatron.engines.replicas import Replica, ReplicaDied, ReplicaSet
from rl_megatron.errors import EngineError, PoisonPrompt
from rl_megatron.observability.timeline import FreeLanes
from rl_megatron.types import Completion, GenerationRequest, NamedVersion

logger = logging.getLogger(__name__)

_LOSSES = 3

ServerLoss = tuple[Server, int]
"""A server, and the number of its earlier losses."""


def is_loss(error: Exception) -> bool:
    """True if the request may have caused the error: it was at a server that accepts requests."""
    if not isinstance(error, AttemptFailed) or isinstance(error, ServerBusy):
        return False
    return isinstance(error, ConnectionBroken) or not isinstance(error, ServerUnreachable)


class Suspects:
    """Counts lost servers by prompt. ``changed`` is called when a request may go to a server that it could not use."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._requests = Counter[str]()  # unanswered ones, by prompt
        self._under: dict[str, set[ServerLoss]] = {}  # prompt -> server losses while it was sampled
        self._counts = Counter[Server]()  # losses
        self._here: dict[Server, list[str]] = {}  # server -> its suspect, once for each request
        self.explained = set[ServerLoss]()
        """Losses that are attributed to dropped prompts."""

    @contextlib.contextmanager
    def following(self, request: GenerationRequest) -> Iterator[None]:
        """Remembers losses under the request's prompt until the last request of the prompt is answered."""
        prompt = _prompt_of(request)
        self._requests[prompt] += 1
        try:
            yield
        finally:
            self._requests[prompt] -= 1
            if not self._requests[prompt]:
                del self._requests[prompt]
                self._under.pop(prompt, None)

    def places(self, request: GenerationRequest, healthy: Sequence[Replica]) -> list[Replica]:
        """Returns the replicas to which the request may go now."""
        prompt = _prompt_of(request)
        if not self._is_suspect(prompt):
            return list(healthy)
        if any(prompt in here for here in self._here.values()):
            return [one for one in healthy if prompt in self._here.get(one.server, ())]
        return [one for one in healthy if one.server not in self._here]

    def _is_suspect(self, prompt: str) -> bool:
        return len(self._under.get(prompt, ())) >= _LOSSES - 1

    @contextlib.contextmanager
    def sent(self, request: GenerationRequest, server: Server) -> Iterator[ServerLoss]:
        """Counts the request at the server. Yields the loss that its failure would be."""
        prompt, loss = _prompt_of(request), (server, self._counts[server])
        if not self._is_suspect(prompt):
            yield loss
            return
        self._here.setdefault(server, []).append(prompt)
        try:
            yield loss
        finally:
            self._here[server].remove(prompt)
            if not self._here[server]:
                del self._here[server]
                self._changed()

    def lost(self, request: GenerationRequest, loss: ServerLoss) -> str:
        """Counts a loss under the request's prompt. Returns the lost servers if the prompt is to be dropped, or ""."""
        server, before = loss
        self._counts[server] = max(self._counts[server], before + 1)
        under = self._under.setdefault(_prompt_of(request), set())
        if loss not in self.explained:
            under.add(loss)
        if len(under) < _LOSSES:
            return ""
        self.explained |= under
        for other in self._under.values():
            if other is not under:
                other.difference_update(under)
        self._changed()
        return ", ".join(sorted(server.url for server, _ in under))


def _prompt_of(request: GenerationRequest) -> str:
    """Returns the name that all requests of one prompt share."""
    return request.prefix_group or request.id


class SlotUse:
    """The seconds in which slots were used since the previous row. ``slots`` is the number for each server.

    A server's completions beyond its slots wait in it. The servers that count are those that answered at the previous
    row.
    """

    def __init__(self, slots: int) -> None:
        self._slots, self._servers = slots, 0
        self._running = Counter[Server]()
        self._used = 0  # completions that have a slot
        self._since: float | None = None
        self._whole = self._seconds = 0.0  # seconds: elapsed, and summed over used slots

    @contextlib.contextmanager
    def busy(self, server: Server, completions: int) -> Iterator[None]:
        """Counts ``completions`` as in flight at ``server``."""
        self._change(server, completions)
        try:
            yield
        finally:
            self._change(server, -completions)

    def row(self, servers: int) -> dict[str, float]:
        """Returns metrics since the previous row; the first row is empty. ``servers`` is how many answer now."""
        self._advance()
        row = {}
        if self._servers and self._whole:
            row["idle/engine_fraction"] = max(0.0, 1 - self._seconds / (self._whole * self._slots * self._servers))
        self._servers, self._whole, self._seconds = servers, 0.0, 0.0
        return row

    def _change(self, server: Server, by: int) -> None:
        self._advance()
        before = self._running[server]
        self._running[server] = before + by
        if not before + by:
            del self._running[server]  # dead servers too
        self._used += min(self._slots, before + by) - min(self._slots, before)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        seconds = 0.0 if self._since is None else now - self._since
        self._since = now
        self._whole += seconds
        self._seconds += seconds * self._used


_LEAD = 2  # completions that a replica may always run beyond the least busy one
_SHARE = 16  # 1 / the fraction of the least busy one's load that it may run beyond that one
_MOST_LEAD, _MOST_SHARE = 2, 4  # the same, before completions move
_REMEMBERED = 16384  # prompts and requests


class ReplicaChooser:
    """Remembers where prompts were sent last.

    A request goes where its own tokens are cached (it was interrupted), or where its prompt is (requests of one
    ``group``). If that replica runs 2 completions, or a 16th, more than the least busy one, it goes to the least busy.
    With 4 replicas of 128 slots and 16 completions of a prompt, 2.0 replicas compute each prompt. If each request goes
    to the least busy replica, 4.0 do.
    """

    def __init__(self) -> None:
        self._servers: dict[str, list[Server]] = {}  # request or group -> servers that had it, oldest first

    def choose(self, request: GenerationRequest, healthy: Sequence[Replica], failed: Replica | None) -> Replica:
        """Chooses one of ``healthy``. It is ``failed`` only if there is no other."""
        chosen = least = min(healthy, key=lambda replica: (replica is failed, replica.server.in_flight))
        keys = [request.id, *([request.prefix_group] if request.prefix_group is not None else [])]
        for key in keys:
            servers = self._servers.get(key, [])
            near = [one for one in healthy if one is not failed and one.server in servers]
            if near:
                nearest = min(near, key=lambda replica: replica.server.in_flight)
                busy = least.server.in_flight
                if nearest.server.in_flight - busy < max(_LEAD, busy // _SHARE):
                    chosen = nearest
                break
        for key in keys:
            servers = self._servers.pop(key, [])
            self._servers[key] = [*(one for one in servers if one is not chosen.server), chosen.server]
        while len(self._servers) > _REMEMBERED:
            del self._servers[next(iter(self._servers))]
        return chosen


def surplus(running: Sequence[int]) -> list[int]:
    """Returns how many of the completions ``running`` on each server should move to the least busy ones.

    After the moves, none runs more than 2, or a quarter, beyond the least busy one. A token takes longer on a server
    with more rows, because the server reads more experts and more of the cache. So uneven load makes long completions
    wait for rows that an idler server could take. Gathering the last completions on few servers would slow them down
    (`python -m bench.moved`).
    """
    have = list(running)
    moved = [0] * len(have)
    while have and max(have) - (least := min(have)) > max(_MOST_LEAD, least // _MOST_SHARE):
        busiest = have.index(max(have))
        moved[busiest] += 1
        have[busiest] -= 1
        have[have.index(least)] += 1
    return moved


_RETRIES = 3  # further attempts of a request, on another replica if there is one
_WAIT = 0.5  # seconds before the first retry; the wait doubles each time
_CLOSE_SECONDS = 10.0
_AGAIN_SECONDS = 0.5  # a server ignores an abort that overtakes its request
_MOVE_SECONDS = 5.0  # seconds from a request's end to moves of others: a move costs the tokens of some seconds
_PASSES = 8  # passes of the event loop that are reserved for sending one request


@dataclass(slots=True)
class CompletionDeadline:
    """The time that a completion, or the completions of one request, may run. ``limit`` None: no limit.

    The clock stops between two attempts. A failed attempt takes no time, because its tokens are lost.
    """

    limit: float | None = None
    elapsed: float = 0.0
    has_expired: bool = False  # the last attempt ran until its time was over
    _began: float = 0.0

    @property
    def left(self) -> float:
        """The seconds until the limit."""
        assert self.limit is not None
        return max(0.0, self.limit - self.elapsed)

    def start(self) -> None:
        """Starts counting an attempt's seconds."""
        self.has_expired, self._began = False, asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Adds the seconds of the attempt that has ended."""
        self.elapsed += asyncio.get_running_loop().time() - self._began

    def extend(self) -> None:
        """Restarts the clock with twice the time, if the time is over."""
        if self.has_expired and self.limit is not None:
            self.limit, self.elapsed = 2 * self.limit, 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A request that a server is sampling."""

    server: Server
    request: GenerationRequest
    name: str
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class AttemptError:
    """An attempt that failed at a server that was not known to be dead."""

    replica: Replica
    server: Server
    loss: ServerLoss | None


class RequestRetrier:
    """Retries failed requests a few times. If a replica dies, its requests go to another, or wait for one."""

    def __init__(self, adapter: Adapter, replicas: ReplicaSet, *, vocab_size: int, slots: int | None = None) -> None:
        self._adapter, self._replicas = adapter, replicas
        self._vocab_size = vocab_size
        self._places = ReplicaChooser()
        self._lanes: dict[int, FreeLanes] = {}  # replica number -> its lanes in the timeline
        self._running: dict[_Attempt, None] = {}  # attempts in the order sent
        self._cancelled: dict[Server, dict[str, GenerationRequest]] = {}  # requests to abort: server -> name -> request
        self._aborts: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._levelling: asyncio.Task[None] | None = None
        self.slot_use = None if slots is None else SlotUse(slots)
        self.suspects = Suspects(replicas.wake)
        self.so_far: dict[str, Completion | None] = {}
        """Request id -> tokens that servers have reported so far. Its keys name the requests to follow."""
        self.aborted: dict[str, AttemptError] = {}
        """Request id -> the replica that last returned an aborted completion of it."""
        self.interrupts = 0
        """The number of times that running requests were interrupted or moved."""
        self.names: Callable[[Completion | None], NamedVersion] | None = None
        """Returns the version that samples a request, from its partial completion. None: servers hold one version."""

    async def sample(
        self,
        request: GenerationRequest,
        only: Replica | None = None,
        *,
        place: int = 0,
        clock: CompletionDeadline | None = None,
        failed: Replica | None = None,
    ) -> list[Completion]:
        """Returns completions from a replica that `ReplicaChooser` chooses, or from ``only``. Raises EngineError;
        without ``only`` also PoisonPrompt, by the rules of the module.

        Deaths of replicas do not count as attempts, nor do failures that a dropped prompt explains. The result includes
        the tokens ``partial`` of the completion at ``place`` in its group. Servers abort requests that run longer than
        ``clock`` allows. A replica that ``failed`` gets the request only if there is no other.
        """
        clock = clock or CompletionDeadline()
        failures = list[AttemptError]()
        begun, refusals = request.partial, dict[int, ServerRefusal]()
        asked = request if begun is None else continuation_request(request, begun, place)
        while True:
            replica = only or await self._choose_replica(request, failed, refusals)
            server, loss = replica.server, None
            try:
                if only is not None:
                    return await self._attempt(replica, asked, begun, clock)
                with self.suspects.sent(request, server) as loss:
                    return await self._attempt(replica, asked, begun, clock)
            except ReplicaDied as error:
                if only is not None:
                    raise
                self._count_loss(request, loss, error)
                failed = replica
                logger.warning("request %r is sent again: %s", request.id, error)
                await self.send_lock()
            except (AttemptFailed, UnknownWeights) as error:
                self._count_loss(request, loss, error)
                failed = replica
                failures.append(AttemptError(replica, server, loss))
                await self._wait(request, error, failures)
            except ServerRefusal as error:
                if only is not None or not self._another(request, replica, error, refusals):
                    raise EngineError(f"request {request.id!r}: {error}") from error
                failed = replica
            except PoisonPrompt:
                raise
            except EngineError as error:
                raise EngineError(f"request {request.id!r}: {error}") from error

    async def send_lock(self) -> None:
        """Serializes requests and aborts. A push, a checkpoint and a server's end have many: sent together, they would
        keep the event loop from all that the learner waits for."""
        async with self._turn:
            for _ in range(_PASSES):
                await asyncio.sleep(0)

    async def replica_that_aborted(
        self, request: GenerationRequest, problem: str, failures: list[AttemptError]
    ) -> Replica:
        """Returns the replica that aborted a completion of ``request`` by itself, like a server that gets SIGTERM.

        Waits as before each retry. ``failures`` are the earlier ones of this completion, and the abort is added to
        them. Raises EngineError if they are too many.
        """
        failure = self.aborted[request.id]
        failures.append(failure)
        await self._wait(request, AttemptFailed(f"{failure.server.url}: {problem}"), failures)
        return failure.replica

    async def _wait(self, request: GenerationRequest, error: Exception, failures: Sequence[AttemptError]) -> None:
        """Suspects the last replica of ``failures`` and waits to retry. Raises EngineError after the last attempt."""
        replica = failures[-1].replica
        replica.suspect(error)
        foreign = isinstance(error, UnknownWeights) and not replica.supervised
        if foreign or await self._too_many(failures):
            raise EngineError(f"request {request.id!r}: {error}; attempts made: {len(failures)}") from error
        wait = _WAIT * 2 ** max(0, self._count_unexplained(failures) - 1)
        logger.warning("request %r: %s; retrying in %g s", request.id, error, wait)
        await asyncio.sleep(wait)

    async def _too_many(self, failures: Sequence[AttemptError]) -> bool:
        if self._count_unexplained(failures) <= _RETRIES:
            return False
        await self._replicas.wait_for_suspects()  # a death may be known only after its requests have failed
        return self._count_unexplained(failures) > _RETRIES

    def _count_unexplained(self, failures: Sequence[AttemptError]) -> int:
        """Counts failures that neither a server's later death nor a dropped prompt explains."""
        explained = self.suspects.explained
        return sum(one.server not in one.replica.ended and one.loss not in explained for one in failures)

    async def _choose_replica(
        self, request: GenerationRequest, failed: Replica | None, refusals: Mapping[int, ServerRefusal]
    ) -> Replica:
        def places() -> list[Replica]:
            healthy = self._replicas.healthy()
            others = [one for one in healthy if one.number not in refusals]
            return self.suspects.places(request, others or healthy)

        return self._places.choose(request, await self._replicas.wait_for_healthy(places), failed)

    def _count_loss(self, request: GenerationRequest, loss: ServerLoss | None, error: Exception) -> None:
        """Counts a loss. Raises PoisonPrompt to drop the prompt. Must be called before another request is sent."""
        if loss is not None and is_loss(error) and (lost := self.suspects.lost(request, loss)):
            raise PoisonPrompt(f"request {request.id!r}: servers were lost under it: {lost}; {error}") from error

    def _another(
        self, request: GenerationRequest, replica: Replica, error: ServerRefusal, refusals: dict[int, ServerRefusal]
    ) -> bool:
        """True if another replica may take a request that this one refuses. Raises PoisonPrompt if two refuse it."""
        if refusals and replica.number not in refusals:
            (other,) = refusals.values()
            raise PoisonPrompt(f"request {request.id!r} is refused by two servers: {other}; {error}") from error
        if replica.number in refusals:
            return False  # no other was left
        refusals[replica.number] = error
        logger.warning("request %r failed (%s); retrying on another server", request.id, error)
        return any(one.number not in refusals for one in self._replicas.healthy())

    async def _attempt(
        self, replica: Replica, request: GenerationRequest, partial: Completion | None, clock: CompletionDeadline
    ) -> list[Completion]:
        """Returns the completions from ``replica``, each joined to the tokens ``partial`` before."""
        server = replica.server
        if self.names is not None and request.named is None:  # a probe names its own
            request = replace(request, named=self.names(partial))
        attempt = _Attempt(server, request, f"{request.id} {uuid.uuid4().hex}")
        kind = "probe" if request.start_version is None else "attempt"
        self._running[attempt] = None
        if clock.limit is not None:
            self._run_detached(self._abort_at_deadline(attempt, clock), server)
        clock.start()
        try:
            lanes = self._lanes.setdefault(replica.number, FreeLanes(replica.title, "request"))
            with self._busy(server, request.num_completions), lanes.during(kind, request=request.id):
                completions = await replica.cancel_on_death(self._adapter.generate(server, request, attempt.name))
            for completion in completions:
                if problem := completion_problem(completion, request, vocab_size=self._vocab_size):
                    raise AttemptFailed(f"{server.url}: {problem}")
            clock.stop()
            if any(one.finish_reason == "abort" for one in completions):
                self.aborted[request.id] = AttemptError(replica, server, None)
            if partial is not None:
                completions = [join_continuation(partial, more) for more in completions]
            if request.id in self.so_far and len(completions[0].token_ids):
                self.so_far[request.id] = completions[0]
            return completions
        except asyncio.CancelledError:
            if server not in self._cancelled:
                self._cancelled[server] = {}
                self._run_detached(self._abort_canceled(server), server)
            self._cancelled[server][attempt.name] = request
            raise
        finally:
            del self._running[attempt]
            attempt.over.set()
            if request.prefix_group is not None and (self._levelling is None or self._levelling.done()):
                self._levelling = asyncio.create_task(self._level())

    @contextlib.contextmanager
    def _busy(self, server: Server, completions: int) -> Iterator[None]:
        use = contextlib.nullcontext() if self.slot_use is None else self.slot_use.busy(server, completions)
        with server.busy(completions), use:
            yield

    def is_sampling_on(self, version: NamedVersion) -> bool:
        """True if a running request names ``version``."""
        return any(attempt.request.named == version for attempt in self._running)

    async def _abort(self, server: Server, requests: Mapping[str, GenerationRequest]) -> None:
        await self.send_lock()
        with contextlib.suppress(AttemptFailed, EngineError):  # the server's end ends the requests too
            await self._adapter.abort_all(server, requests, self.send_lock)

    async def _abort_canceled(self, server: Server) -> None:
        """Aborts canceled requests at the server, which may otherwise notice closed connections seconds later."""
        await self.send_lock()  # the end of a run cancels all requests together
        await self._abort(server, self._cancelled.pop(server))

    async def interrupt(self) -> None:
        """Aborts the running requests in `so_far`. Returns when each is over, and all its tokens are there."""
        self.interrupts += 1
        await self._end([attempt for attempt in self._running if attempt.request.id in self.so_far])

    async def _level(self) -> None:
        """Waits some seconds, then aborts requests that should move. A less busy replica continues from their tokens.

        Only requests of one completion of a ``group`` move, the last sent first: they need the least recomputation.
        None moves while a push has servers paused.
        """
        await asyncio.sleep(_MOVE_SECONDS)
        healthy = self._replicas.healthy()
        if any(replica.server.paused for replica in healthy):
            return
        moved: list[_Attempt] = []
        for replica, count in zip(healthy, surplus([one.server.in_flight for one in healthy]), strict=True):
            if count:
                its = [
                    one
                    for one in self._running
                    if one.server is replica.server and one.request.prefix_group is not None
                ]
                moved += its[max(0, len(its) - count) :]
        if moved:
            logger.info("%d completions move to less busy servers", len(moved))
            self.interrupts += 1
            await self._end(moved)

    async def _abort_at_deadline(self, attempt: _Attempt, clock: CompletionDeadline) -> None:
        """Aborts the attempt if it still runs when its time is over."""
        try:
            async with asyncio.timeout(clock.left):
                await attempt.over.wait()
        except TimeoutError:
            clock.has_expired = True
            await self._end([attempt])

    async def _end(self, running: Sequence[_Attempt]) -> None:
        """Aborts requests until each is over."""
        while running := [attempt for attempt in running if not attempt.over.is_set()]:
            by_server: dict[Server, dict[str, GenerationRequest]] = {}
            for attempt in running:
                by_server.setdefault(attempt.server, {})[attempt.name] = attempt.request
            await asyncio.gather(*itertools.starmap(self._abort, by_server.items()))
            waiting = [asyncio.ensure_future(attempt.over.wait()) for attempt in running]
            try:
                await asyncio.wait(waiting, timeout=_AGAIN_SECONDS)
            finally:
                for one in waiting:
                    one.cancel()

    def _run_detached(self, work: Coroutine[None, None, None], server: Server) -> None:
        """Runs ``work`` with ``server`` in the background. `close` waits for it."""
        task = asyncio.create_task(work, name=server.url)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Waits until servers have got all aborts, at most 10 s: their own limit may be as long as a request's."""
        if self._levelling is not None:
            self._levelling.cancel()
        if not self._aborts:
            return
        done, late = await asyncio.wait(self._aborts, timeout=_CLOSE_SECONDS)
        for task in late:
            task.cancel()
        if late:
            servers = ", ".join(sorted({task.get_name() for task in late}))
            logger.warning("aborted requests are left: no answer from %s in %g s", servers, _CLOSE_SECONDS)
        for task in done:
            task.result()
