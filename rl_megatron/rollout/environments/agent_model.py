"""The model as an agent has it: a method, and a URL with a key for clients of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from rl_megatron.environments.protocol import Model, OpenAIMessage, Reply
from rl_megatron.rollout.endpoint.keys import RequestCounts
from rl_megatron.rollout.endpoint.server import Endpoint
from rl_megatron.rollout.environments.episode import Episode

_OPENING_LIMIT = 60.0  # seconds; a trajectory without time left gets a URL too, which refuses its turns by that reason


class AgentModel(Model):
    """One trajectory's, made in the event loop that serves it and used in the agent's own thread."""

    def __init__(self, episode: Episode, endpoint: Endpoint) -> None:
        self._episode, self._endpoint = episode, endpoint
        self._loop = asyncio.get_running_loop()
        self._served: tuple[str, str] | None = None  # once it is asked for
        self._closed = False
        self.requests: RequestCounts | None = None  # what clients asked for, once it is closed

    @override
    async def reply(self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        asking = asyncio.run_coroutine_threadsafe(self._episode.reply(tuple(messages), tools), self._loop)
        return await asyncio.wrap_future(asking)

    @property
    @override
    def base_url(self) -> str:
        return self._open()[0]

    @property
    @override
    def api_key(self) -> str:
        return self._open()[1]

    def close(self) -> None:
        """End the key. Called in the event loop that serves it."""
        self._closed = True
        if self._served is not None:
            self.requests = self._endpoint.requests(self._served[1])
            self._endpoint.close(self._served[1])

    def _open(self) -> tuple[str, str]:
        async def opened() -> tuple[str, str]:
            if self._closed:
                raise RuntimeError("this trajectory has ended; nothing serves it any more")
            if self._served is None:
                self._served = self._endpoint.open(self._episode)
            return self._served

        opening = asyncio.run_coroutine_threadsafe(opened(), self._loop)
        try:
            return opening.result(_OPENING_LIMIT)
        except TimeoutError:
            raise RuntimeError(f"the run's event loop opened no URL within {_OPENING_LIMIT:g} s") from None
