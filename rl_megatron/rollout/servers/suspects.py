"""Finds the prompt that ends engines, among hundreds that were only in flight beside it.

Engines die of many causes, and each death fails all requests in flight. So one death drops nothing:

1. A prompt under which a server was lost (it died, the connection broke, or it answered with an error) is asked again
   as any other, by a replica that was not lost under it, if there is one.
2. A prompt under which two servers were lost, or one that lives on twice, stands *trial*: all its requests go to one
   replica, where at most 15 others stand trial.
3. A prompt under which that is lost too stands trial *alone*, one prompt at a time in the run, some seconds after the
   last loss: its replica takes nothing else meanwhile. Where few stand trial, each does so at once.
4. A prompt under which a server is lost while nothing else is in flight there is poison, if servers of two replicas
   were lost under it (of one, where the run has no other). These losses count for no other prompt.

So a poison prompt ends the servers that had its first requests, and at most three more. Another prompt is dropped only
if a server ends of another cause just while that prompt stands trial alone. Were all trials alone, two servers that die
with 200 prompts each would keep these waiting for hours.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rl_megatron.rollout.servers.http import AttemptFailed, Broken, Busy, Server, Unreachable
from rl_megatron.rollout.servers.replicas import Replica
from rl_megatron.types import GenerationRequest

_LOSSES = 2  # under a prompt, before it stands trial
_TOGETHER = 16  # prompts that stand trial beside each other on a replica
_FEW = 4  # prompts of which each stands trial alone at once


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A request that is at a server."""

    prompt: str
    trial: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """A server died, or answered with an error: it may do so again for what it is sent afterwards."""

    server: Server
    replica: int
    beside: frozenset[Flight]  # what was in flight there


@dataclass(slots=True)
class _Record:
    lost: set[_Loss] = field(default_factory=set)  # under the prompt
    alone: bool = False  # whether it stands the next trial alone
    poison: bool = False

    @property
    def stands_trial(self) -> bool:
        return len(self.lost) >= _LOSSES


def prompt_of(request: GenerationRequest) -> str:
    """The name that all requests of one prompt share."""
    return request.group or request.id


def is_loss(error: AttemptFailed) -> bool:
    """Whether the request may be why it failed: it was at a server that takes requests."""
    return not isinstance(error, Busy) and (isinstance(error, Broken) or not isinstance(error, Unreachable))


class Suspects:
    """Follows the requests of a run, and prompts under which servers were lost. Its rules are those above.

    ``changed`` is called whenever a request may go where it could not. ``calm``: seconds since any server was lost
    until a prompt stands trial alone, so that servers that end one after the other of one cause are no two trials.
    """

    def __init__(self, changed: Callable[[], None], *, calm: float) -> None:
        self._changed, self._calm = changed, calm
        self._last = -math.inf  # the time at which a server was lost
        self._records: dict[str, _Record] = {}
        self._requests = Counter[str]()  # that are not answered, by prompt
        self._flights: dict[Server, set[Flight]] = {}
        self._losses: dict[Server, _Loss] = {}  # the last of each server
        self._explained: set[_Loss] = set()  # those under poison
        self._kept: tuple[str, Server] | None = None  # a prompt that stands trial alone, and where
        self._timer: asyncio.TimerHandle | None = None  # until no server was lost for long enough

    @property
    def tries(self) -> bool:
        """Whether any prompt stands trial."""
        return any(record.stands_trial for record in self._records.values())

    @contextlib.contextmanager
    def following(self, request: GenerationRequest) -> Iterator[None]:
        """Remember what is lost under the request's prompt until the last request of it is answered."""
        prompt = prompt_of(request)
        self._requests[prompt] += 1
        try:
            yield
        finally:
            self._requests[prompt] -= 1
            if not self._requests[prompt]:
                del self._requests[prompt]
                record = self._records.pop(prompt, None)
                self._leave(prompt)
                if record is not None and record.stands_trial:
                    self._changed()  # now they may be few

    def places(self, request: GenerationRequest, healthy: Sequence[Replica]) -> list[Replica]:
        """Those of the replicas to which the request may go now."""
        prompt = prompt_of(request)
        record = self._records.get(prompt, _Record())
        lost = {loss.replica for loss in record.lost}
        if record.stands_trial and (record.alone or self._are_few()):
            record.alone = True
            return self._alone(prompt, [one for one in healthy if one.number not in lost] or list(healthy))
        kept = None if self._kept is None else self._kept[1]
        open_to_all = [one for one in healthy if one.server is not kept]
        fresh = [one for one in open_to_all if one.number not in lost] or open_to_all
        if not record.stands_trial:
            return fresh
        servers = [one.server for one in open_to_all]
        trials = {one: {flight.prompt for flight in self._flights.get(one, ()) if flight.trial} for one in servers}
        if here := [one for one in open_to_all if prompt in trials[one.server]]:
            return here
        return [one for one in fresh if len(trials[one.server]) < _TOGETHER]

    def _are_few(self) -> bool:
        return sum(record.stands_trial for record in self._records.values()) <= _FEW

    def _alone(self, prompt: str, places: Sequence[Replica]) -> list[Replica]:
        """The replica that is kept for the prompt, once nothing else is in flight there."""
        loop = asyncio.get_running_loop()
        if (wait := self._last + self._calm - loop.time()) > 0:
            self._timer = self._timer or loop.call_later(wait, self._calmed)
            return []
        if self._kept is None and places:
            self._kept = prompt, min(places, key=lambda one: one.server.in_flight).server
        if self._kept is None or self._kept[0] != prompt:
            return []
        found = [one for one in places if one.server is self._kept[1]]
        if not found:  # it is gone
            self._kept = None
            return self._alone(prompt, places) if places else []
        others = {flight.prompt for flight in self._flights.get(found[0].server, ())} - {prompt}
        return [] if others else found

    def _calmed(self) -> None:
        self._timer = None
        self._changed()

    def _leave(self, prompt: str) -> None:
        if self._kept is not None and self._kept[0] == prompt:
            self._kept = None
            self._changed()

    @contextlib.contextmanager
    def sent(self, request: GenerationRequest, server: Server) -> Iterator[Flight]:
        """The request is at the server."""
        prompt = prompt_of(request)
        record = self._records.get(prompt)
        flight = Flight(prompt, record is not None and record.stands_trial)
        self._flights.setdefault(server, set()).add(flight)
        try:
            yield flight
        finally:
            self._flights[server].discard(flight)
            if not self._flights[server]:
                del self._flights[server]
            if flight.trial or (self._kept is not None and self._kept[1] is server):
                self._changed()  # all that wait look again

    def lost(self, flight: Flight, replica: Replica, server: Server, *, replicas: int) -> bool:
        """Note that ``server`` was lost under a request; ``replicas`` are left to the run.

        Returns whether the request's prompt is poison. It must be called before any other request is sent.
        """
        record = self._records.setdefault(flight.prompt, _Record())
        self._leave(flight.prompt)
        self._last = asyncio.get_running_loop().time()
        loss = self._losses.get(server)
        if loss is None or flight not in loss.beside:  # it was sent after an answer that was an error
            loss = self._losses[server] = _Loss(server, replica.number, frozenset(self._flights[server]))
        if record.poison or loss in self._explained:
            return record.poison
        record.lost.add(loss)
        if not flight.trial:
            return False
        record.alone = True
        lost_at = {one.replica for one in record.lost}
        if len({one.prompt for one in loss.beside}) > 1 or len(lost_at) < min(2, replicas):
            return False
        record.poison = True
        self._explain(record)
        return True

    def explained(self) -> set[Server]:
        """The servers that were lost under poison."""
        return {loss.server for loss in self._explained}

    def explain(self, flight: Flight | None) -> bool:
        """Whether a request failed beside one whose prompt was found to be poison by it."""
        return flight is not None and any(flight in loss.beside for loss in self._explained)

    def told(self, flight: Flight) -> str:
        """The servers that were lost under the prompt, in words."""
        numbers = Counter(loss.replica for loss in self._records[flight.prompt].lost)
        return ", ".join(f"replica {number} {count} times" for number, count in sorted(numbers.items()))

    def _explain(self, poison: _Record) -> None:
        self._explained |= poison.lost
        for prompt, record in self._records.items():
            if record is not poison:
                record.lost -= poison.lost
                record.alone = record.alone and record.stands_trial
                if not record.alone:
                    self._leave(prompt)
        self._changed()
