"""Who may ask: a key for each conversation, and what a conversation has answered."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_megatron.rollout.endpoint.served import RequestRefused, Served

_MOST_ENDED = 65_536  # keys that are remembered, to say that their conversation has ended


@dataclass(slots=True, kw_only=True)
class RequestCounts:
    """What clients asked for in a conversation."""

    answered: int = 0  # turns that were sampled
    retried: int = 0  # requests that got a turn that was sampled for an earlier one
    refused: int = 0
    overridden: int = 0  # turns whose client asked for another temperature or top_p than the run's
    own_ms: list[float] = field(default_factory=list)  # of each turn answered: what the endpoint itself took


@dataclass(slots=True, kw_only=True, eq=False)
class OpenConversation:
    """One open conversation, its answers by what was asked last, and all turns that are being sampled."""

    served: Served
    requests: RequestCounts = field(default_factory=RequestCounts)
    answers: dict[bytes, asyncio.Task[Any]] = field(default_factory=dict)
    sampling: set[asyncio.Task[Any]] = field(default_factory=set)
    left: dict[bytes, list[asyncio.Task[Any]]] = field(default_factory=dict)  # by what was asked: their clients went

    def left_turn(self, digest: bytes, *, done: bool) -> asyncio.Task[Any] | None:
        """The first turn whose client has gone, for a request that asks the same: also if sampled, where ``done``."""
        turns = [task for task in self.left.pop(digest, ()) if done or not task.done()]
        if len(turns) > 1:
            self.left[digest] = turns[1:]
        return turns[0] if turns else None

    def forget(self, digest: bytes, failed: asyncio.Task[Any]) -> None:
        """Answer nobody with a turn that failed."""
        if self.answers.get(digest) is failed:
            del self.answers[digest]
        if turns := [task for task in self.left.pop(digest, ()) if task is not failed]:
            self.left[digest] = turns

    def end(self) -> None:
        """Give up what is being sampled."""
        for task in self.sampling:
            task.cancel()


class Keys:
    """Keys of open conversations, by their digests: no comparison of a key depends on another's first characters."""

    def __init__(self) -> None:
        self._lines: dict[bytes, OpenConversation] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def open(self, served: Served) -> str:
        """A key of 256 random bits for the conversation."""
        key = secrets.token_hex(32)
        self._lines[_digest(key)] = OpenConversation(served=served)
        return key

    def close(self, key: str) -> None:
        """End the key's conversation; it may have ended already."""
        digest = _digest(key)
        line = self._lines.pop(digest, None)
        if line is not None:
            line.end()
        self._ended[digest] = None
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def requests(self, key: str) -> RequestCounts:
        """Of the key's conversation, which is open."""
        return self._lines[_digest(key)].requests

    def line(self, headers: Mapping[bytes, bytes]) -> OpenConversation:
        """The conversation of a request. Raises RequestRefused: 401 for no key or a foreign one, 410 for an ended."""
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise RequestRefused(401, "no key; send the conversation's as Authorization: Bearer")
        digest = _digest(key.strip())
        if (line := self._lines.get(digest)) is not None:
            return line
        if digest in self._ended:
            raise RequestRefused(410, "this conversation has ended")
        raise RequestRefused(401, "the key is no conversation's")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
