"""Drops a prompt under which three servers were lost.

A server is lost if it dies, if its connection breaks, or if it answers a request with an error. That may fail all
requests in flight there, so a prompt under which two were lost is a *suspect*: a server has one suspect at a time, with
all of its requests. The third loss drops the prompt, and counts for no other prompt that was in flight beside it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rl_megatron.rollout.servers.http import AttemptFailed, Broken, Busy, Server, Unreachable
from rl_megatron.rollout.servers.replicas import Replica
from rl_megatron.types import GenerationRequest

_LOSSES = 3

ServerLoss = tuple[Server, int]
"""A server, and how many losses of it came before."""


def is_loss(error: Exception) -> bool:
    """True if the request may be why it failed: it was at a server that takes requests."""
    if not isinstance(error, AttemptFailed) or isinstance(error, Busy):
        return False
    return isinstance(error, Broken) or not isinstance(error, Unreachable)


class Suspects:
    """Counts lost servers by prompt. ``changed`` is called when a request may go where it could not."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._requests = Counter[str]()  # that are not answered, by prompt
        self._under: dict[str, set[ServerLoss]] = {}  # by prompt
        self._counts = Counter[Server]()  # losses
        self._here: dict[Server, list[str]] = {}  # the suspect at a server, once for each of its requests
        self.explained = set[ServerLoss]()
        """The losses under prompts that were dropped."""

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
    """The name that all requests of one prompt share."""
    return request.group or request.id
