"""Presents engine servers as one RolloutEngine, and checks that only served versions sampled its completions.

An adapter (adapter.py) translates requests and orders for its server. attempts.py sends a request to replicas until one
answers; weights.py has replicas load and serve new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.adapter import Adapter
from rl_megatron.rollout.servers.answers import as_it_should_end, joined, rest_of
from rl_megatron.rollout.servers.attempts import Attempts
from rl_megatron.rollout.servers.http import AttemptFailed, Server
from rl_megatron.rollout.servers.replicas import ReplicaSet
from rl_megatron.rollout.servers.weights import ReplicaWeights
from rl_megatron.types import Completion, GenerationRequest


class ServedEngine:
    """A RolloutEngine over servers; the weight sync uses its ``weights``.

    During a push, running requests are paused and continue with the new weights, or are aborted and sent again with
    their tokens (``running_requests``); their answers are released after the commit. A prompt and its completion have
    at most ``max_length`` tokens, of ids below ``vocab_size``: other requests, which a server would truncate or crash
    on, are refused here.
    """

    def __init__(
        self, adapter: Adapter, servers: Sequence[Server], section: ServerSection, *, max_length: int, vocab_size: int
    ) -> None:
        self.adapter = adapter
        self.replicas = ReplicaSet(adapter.name, servers)
        self._attempts = Attempts(adapter, self.replicas, section, vocab_size=vocab_size)
        self.weights = ReplicaWeights(adapter, self.replicas, section, self._attempts)
        self._max_length, self._vocab_size = max_length, vocab_size
        self._slots = asyncio.Semaphore(section.concurrency)

    @property
    def servers(self) -> list[Server]:
        """The servers that answer."""
        return [replica.server for replica in self.replicas.present()]

    def metrics(self) -> dict[str, int]:
        """Counts of healthy replicas and of restarts."""
        restarts = sum(replica.restarts for replica in self.replicas.all)
        return {"engine/healthy": len(self.replicas.healthy()), "engine/restarts": restarts}

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Completions sampled by served versions alone. Raises EngineError."""
        if not request.num_completions:
            return []
        self._check(request)
        async with self._slots:
            before = await self.weights.served_version(request)
            started = await self._attempts.sampled(request)
            completions = await asyncio.gather(*(self._finished(request, c, n, before) for n, c in enumerate(started)))
            after = await self.weights.served_version(request)
        if len(completions) != request.num_completions:
            raise EngineError(
                f"request {request.id!r}: {len(completions)} completions arrived of {request.num_completions}"
            )
        strays = {s.version for c in completions for s in c.spans if not before <= s.version <= after}
        if strays:
            raise EngineError(
                f"request {request.id!r} was sampled with version {min(strays)}, but {before} to {after} were served: "
                "check that no other run uses the servers and that nobody restarted one"
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

    async def _finished(
        self, request: GenerationRequest, completion: Completion, place: int, version: int
    ) -> Completion:
        """The completion at ``place``; if an update aborted it, with the rest sampled by newer weights.

        Raises EngineError if the server aborted it although no update began since ``version`` was served.
        """
        while (completion := as_it_should_end(completion, request)).finish_reason == "abort":
            served = await self.weights.served_version(request)
            if served == version:
                raise EngineError(
                    f"request {request.id!r}: the server aborted it after {len(completion.token_ids)} tokens, although "
                    f"weight version {served} was served all the time; check that no other client aborts or pauses"
                )
            version = served
            (more,) = await self._attempts.sampled(rest_of(request, completion, place))
            completion = joined(completion, more)
        return completion

    async def tokenized(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...] | None:
        """Token ids of a text by a replica's own tokenizer; None if it has none. Raises EngineError."""
        server = self.servers[0]
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        try:
            if "/tokenize" not in (await server.get("/openapi.json"))["paths"]:
                return None
            answer = await server.post("/tokenize", body)
        except AttemptFailed as error:
            raise EngineError(f"its tokenizer does not answer: {error}") from error
        return tuple(answer["tokens"])

    async def close(self) -> None:
        """Close all connections."""
        await self._attempts.close()
        await asyncio.gather(*(replica.server.close() for replica in self.replicas.all))
