"""Presents engine servers as one RolloutEngine, and checks that only served versions sampled its completions.

An adapter (adapter.py) translates requests and commands for its server. requests.py sends a request to replicas until
one answers. weights.py makes replicas load and serve new weights. For the timeline, servers report their load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.engines.adapter import Adapter, Sampling
from rl_megatron.engines.answers import fix_finish_reason
from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.engines.replicas import Replica, ReplicaSet
from rl_megatron.engines.requests import AttemptError, CompletionDeadline, RequestRetrier
from rl_megatron.engines.weights import ReplicaWeights
from rl_megatron.errors import EngineError
from rl_megatron.observability import timeline
from rl_megatron.observability.timeline import Lane
from rl_megatron.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0
"""The time between two requests for a load, independent of the number of servers."""
_LIMIT_SECONDS = 1.0


class GaugePoller:
    """Asks one server for its load every ``seconds``, in rotation, so the cost does not grow with their number.

    If a server does not answer in a second, or answers with an error, it is asked again at its next turn. Its
    supervisor checks whether it works.
    """

    def __init__(self, adapter: Sampling, replicas: ReplicaSet, seconds: float = PERIOD_SECONDS) -> None:
        self._adapter, self._replicas, self._seconds = adapter, replicas, seconds
        self._lanes: dict[int, Lane] = {}
        self._made: dict[Server, tuple[float, int]] = {}  # present server -> its tokens, and when they were counted

    @contextlib.asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        """Context in which servers are asked. If a response cannot be read, it warns and stops asking."""
        task = asyncio.create_task(self._poll_round_robin())
        try:
            yield
        finally:
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(ended, Exception):
                logger.warning("the timeline has no load of servers: %r", ended, exc_info=ended)

    async def _poll_round_robin(self) -> None:
        for turn in count():
            await asyncio.sleep(self._seconds)
            present = self._replicas.present()
            if not present:
                continue
            replica = present[turn % len(present)]
            try:
                async with asyncio.timeout(_LIMIT_SECONDS):
                    await self._ask(replica)
            except (TimeoutError, AttemptFailed, EngineError):
                continue
            except (ValueError, LookupError, TypeError) as error:
                logger.warning("the timeline has no load of servers: %s: %r", replica.server.url, error)
                return

    async def _ask(self, replica: Replica) -> None:
        server = replica.server
        found = await self._adapter.gauges(server)
        if found is None:
            return
        lane = self._lanes.setdefault(replica.number, Lane(replica.title, ""))
        timeline.gauge(lane, "requests", running=found.running, waiting=found.waiting)
        if found.cache is not None:
            timeline.gauge(lane, "cache", share=round(found.cache, 4))
        now, speed = timeline.now(), found.tokens_per_second
        if speed is None and found.tokens is not None:
            before = self._made.get(server)
            present = {replica.server for replica in self._replicas.present()}
            self._made = {each: made for each, made in self._made.items() if each in present}
            self._made[server] = found.tokens, now
            speed = None if before is None else (found.tokens - before[0]) / ((now - before[1]) / 1e9)
        if speed is not None:
            timeline.gauge(lane, "tokens", per_second=round(speed, 1))


class ServerEngine:
    """A RolloutEngine over servers. The weight sync uses its ``weights``.

    During a push, running requests are paused and continue with the new weights, or are aborted and resent with their
    tokens (``running_requests``). Their completions are released after the commit. A prompt and its completion have at
    most ``max_length`` tokens, with ids below ``vocab_size``. Other requests are an error here, because a server would
    truncate them or crash. At most ``rollout.server.max_concurrent_groups`` groups of ``group_size`` completions are in
    flight, in requests of any size. Evaluations may have that many problems of ``samples`` completions, if these are
    more. ``slots``: of each server, if they are known and each request is for one completion.
    """

    def __init__(
        self,
        adapter: Adapter,
        servers: Sequence[Server],
        section: ServerSection,
        *,
        max_length: int,
        vocab_size: int,
        group_size: int = 1,
        samples: int = 1,
        slots: int | None = None,
    ) -> None:
        self.adapter = adapter
        self.replicas = ReplicaSet(adapter.name, servers)
        self.attempts = RequestRetrier(adapter, self.replicas, vocab_size=vocab_size, slots=slots)
        self.weights = ReplicaWeights(adapter, self.replicas, section, self.attempts)
        self._max_length, self._vocab_size = max_length, vocab_size
        self._in_flight = _ConcurrencyLimit(section.max_concurrent_groups * group_size)
        self._ahead = _ConcurrencyLimit(section.max_concurrent_groups * max(group_size, samples))

    @property
    def servers(self) -> list[Server]:
        """The servers that answer."""
        return [replica.server for replica in self.replicas.present()]

    def metrics(self) -> dict[str, int]:
        """Returns the numbers of healthy replicas and of restarts."""
        restarts = sum(replica.restarts for replica in self.replicas.all)
        return {"engine/healthy": len(self.replicas.healthy()), "engine/restarts": restarts}

    def step_row(self) -> dict[str, float]:
        """Returns metrics of a step, after its push: current ones, and those since the previous call."""
        row: dict[str, float] = {**self.metrics(), "seconds/pause": self.weights.paused_seconds}
        for hooks in self.adapter.hooks:
            row |= hooks.row()
        if self.attempts.slot_use is not None:
            row |= self.attempts.slot_use.row(len(self.replicas.present()))
        return row

    def attempt_count(self, replica: Replica) -> int:
        """Returns how many of the replica's restarts count. Deaths of its servers under dropped prompts do not."""
        explained = {server for server, _ in self.attempts.suspects.explained}
        return max(0, replica.restarts - replica.forgiven - len((replica.ended - replica.forgiven_ended) & explained))

    def partial_completion(self, request_id: str) -> Completion | None:
        """Returns the tokens of a running request of one completion, as far as servers have reported them."""
        return self.attempts.so_far.get(request_id)

    async def collect_partials(self) -> None:
        """Makes `partial_completion` include all tokens that running requests of one completion have sampled.

        Servers abort the requests. Each is resent with its tokens, which servers still have in their caches.
        """
        await self.attempts.interrupt()

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Returns completions that only served versions sampled, except for tokens ``begun`` before. Raises
        EngineError, and PoisonPrompt if the prompt is to be dropped."""
        if not request.num_completions:
            return []
        self._check(request)
        if request.partial is not None and not len(request.partial.token_ids):
            request = replace(request, partial=None)  # it has no version
        if request.num_completions == 1:
            self.attempts.so_far[request.id] = request.partial
        try:
            in_flight = self._ahead if request.skips_queue else self._in_flight
            async with in_flight.places(request.num_completions):
                with self.attempts.suspects.following(request):
                    return await self._generated(request)
        finally:
            self.attempts.so_far.pop(request.id, None)
            self.attempts.aborted.pop(request.id, None)

    async def _begin(self, request: GenerationRequest) -> int:
        """Waits for the end of an update and for the request's turn. Returns the served version. Raises EngineError."""
        while True:
            version = await self.weights.served_version(request)
            await self.attempts.send_lock()
            if version == self.weights.version:  # otherwise an update has begun
                return version

    async def _generated(self, request: GenerationRequest) -> Sequence[Completion]:
        before, begun = await self._begin(request), request.partial
        if request.start_version is None:
            began = before if begun is None else begun.spans[0].version
            request = replace(request, start_version=0 if request.skips_queue else began)
        clock = CompletionDeadline(request.max_seconds)
        if begun is None:
            state = self._state(before)
            started = await self.attempts.sample(request, clock=clock)
        else:
            state = None
            started = [begun]
        finishing = (self._finished(request, c, n, state, replace(clock)) for n, c in enumerate(started))
        completions = await _all_or_none(finishing)
        after = await self.weights.served_version(request)
        if len(completions) != request.num_completions:
            raise EngineError(
                f"request {request.id!r}: {len(completions)} completions arrived of {request.num_completions}"
            )
        old = {span.version for span in begun.spans} if begun else set[int]()
        strays = {s.version for c in completions for s in c.spans if not before <= s.version <= after} - old
        if strays:
            raise EngineError(
                f"request {request.id!r} was sampled with version {min(strays)}, but {before} to {after} were served: "
                "check that no other run uses the servers, and that none was restarted"
            )
        return completions

    def _check(self, request: GenerationRequest) -> None:
        prompt, new = request.token_ids, request.params.max_new_tokens
        ids = np.fromiter(prompt, np.int64, len(prompt))
        if request.partial is not None and request.num_completions != 1:
            problem = f"num_completions={request.num_completions}, but what was begun is one completion"
        elif not prompt or ids.min() < 0 or ids.max() >= self._vocab_size:
            problem = f"the prompt must have one or more token ids in [0, {self._vocab_size}), got {prompt[:8]}..."
        elif len(prompt) + new > self._max_length:
            problem = (
                f"{len(prompt)} prompt tokens + max_new_tokens={new} exceed the engine's "
                f"max_length={self._max_length}; shorten the prompt or lower max_new_tokens"
            )
        else:
            return
        raise EngineError(f"request {request.id!r}: {problem}")

    async def _finished(
        self,
        request: GenerationRequest,
        completion: Completion,
        place: int,
        state: tuple[int, int] | None,
        clock: CompletionDeadline,
    ) -> Completion:
        """Returns the completion at ``place``, resumed if an update, an interrupt or a server's end aborted it.

        A completion with no time left ends, unless it has no token yet: it waited for a slot, and gets twice the time.
        ``state`` is the state when it was sent, or None if it began before. Raises EngineError if servers keep aborting
        it although there is neither an update nor an interrupt.
        """
        failures = list[AttemptError]()
        while (completion := fix_finish_reason(completion, request)).finish_reason == "abort":
            if clock.has_expired and (made := len(completion.token_ids)):
                logger.info("request %r: ended after %d tokens in %.1f s", request.id, made, clock.elapsed)
                return replace(completion, finish_reason="length")
            now = self._state(await self._begin(request))
            failed = None
            if state == now and not clock.has_expired:
                problem = (
                    f"the server aborted it after {len(completion.token_ids)} tokens, although weight version {now[0]} "
                    "was served all the time, as one does that shuts down; check that no other client aborts or pauses"
                )
                failed = await self.attempts.replica_that_aborted(request, problem, failures)
            state = now
            clock.extend()
            rest = replace(request, num_completions=1, partial=completion)
            (completion,) = await self.attempts.sample(rest, place=place, clock=clock, failed=failed)
        return completion

    def _state(self, version: int) -> tuple[int, int]:
        """Returns a state that changes before a server may abort a request: (served version, number of interrupts)."""
        return version, self.attempts.interrupts

    async def tokenized(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...] | None:
        """Returns token ids of a text by a replica's tokenizer, or None if it has no tokenizer. Raises EngineError."""
        server = self.servers[0]
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        try:
            if "/tokenize" not in (await server.get("/openapi.json")).get("paths", ()):
                return None
            answer = await server.post("/tokenize", body)
        except AttemptFailed as error:
            raise EngineError(f"its tokenizer does not answer: {error}") from error
        return tuple(answer["tokens"])

    async def close(self) -> None:
        """Closes all connections."""
        await self.attempts.close()
        await asyncio.gather(*(replica.server.close() for replica in self.replicas.all))


class _ConcurrencyLimit:
    """Limits completions in flight to ``limit``. Requests wait in order, each for places of all its completions."""

    def __init__(self, limit: int) -> None:
        self._most, self._free, self._first = limit, asyncio.Semaphore(limit), asyncio.Lock()

    @contextlib.asynccontextmanager
    async def places(self, completions: int) -> AsyncIterator[None]:
        """Context that holds a place for each of ``completions``, or all places if there are fewer."""
        taken = 0
        try:
            async with self._first:  # otherwise two requests with a part each would wait for each other
                while taken < min(completions, self._most):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


async def _all_or_none(work: Iterable[Coroutine[None, None, Completion]]) -> list[Completion]:
    """Returns the results. An error of one cancels the others, which would otherwise keep sending requests."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
