"""The endpoint's paths, as an ASGI application."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rl_megatron.errors import EngineError
from rl_megatron.rollout.conversation.messages import MessagesRefused
from rl_megatron.rollout.endpoint.bodies import ReceivePart, SendPart, method_of, read_body, read_request, respond
from rl_megatron.rollout.endpoint.keys import Keys, OpenConversation, RequestCounts
from rl_megatron.rollout.endpoint.served import RequestRefused
from rl_megatron.rollout.endpoint.shapes import (
    ChatRequest,
    TokenRequest,
    chat_answer,
    chat_stream,
    models,
    refused_body,
    token_answer,
)
from rl_megatron.types import SamplingParams

logger = logging.getLogger(__name__)

_RETRY = b"x-stainless-retry-count"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    receive: ReceivePart  # what comes after the body
    line: OpenConversation
    read: float = field(default_factory=time.perf_counter)  # when the body was there

    def took(self, waited: float) -> None:
        """Count the time until now, but for what its turn ``waited``."""
        self.line.requests.own_ms.append((time.perf_counter() - self.read - waited) * 1000)


class Application:
    """ASGI: one HTTP request a call."""

    def __init__(self, keys: Keys) -> None:
        self._keys, self._turns, self._warned = keys, itertools.count(1), False

    async def __call__(self, scope: Mapping[str, Any], receive: ReceivePart, send: SendPart) -> None:
        """Answer, or refuse with a status and OpenAI's form of an error."""
        status, headers = 200, dict[bytes, bytes]()
        line: OpenConversation | None = None
        try:
            line = self._keys.line(dict(scope["headers"]))
            kind, parts = await self._answer(scope, receive, line)
        except (RequestRefused, MessagesRefused, RecursionError) as error:  # read, but too deep to be written again
            status = error.status if isinstance(error, RequestRefused) else 400
            kind, parts = b"application/json", [msgspec.json.encode(refused_body(status, str(error)))]
            if line is not None:
                line.requests.refused += 1
        except EngineError as error:
            status = 502
            said = refused_body(status, f"the engine failed: {error}")
            kind, parts = b"application/json", [msgspec.json.encode(said)]
            headers[b"x-should-retry"] = b"false"  # the run retries by itself
        await respond(send, status, {b"content-type": kind, **headers}, parts)

    async def _answer(
        self, scope: Mapping[str, Any], receive: ReceivePart, line: OpenConversation
    ) -> tuple[bytes, Iterable[bytes]]:
        headers = dict(scope["headers"])
        path = method_of(scope, {"/v1/models": "GET", "/health": "GET"} | dict.fromkeys(_ASKED, "POST"))
        if path == "/health":
            return b"application/json", [b'{"status":"ok"}']
        if path == "/v1/models":
            return b"application/json", [msgspec.json.encode(models(line.served.max_length))]
        body = await read_body(headers, receive)
        asked = _Asked(path=path, headers=headers, body=body, receive=receive, line=line)
        return await (self._chat(asked) if path == _ASKED[0] else self._tokens(asked))

    async def _chat(self, asked: _Asked) -> tuple[bytes, Iterable[bytes]]:
        request = read_request(asked.body, ChatRequest)
        request.check()
        tools = () if request.tool_choice == "none" else request.tools or ()
        served = asked.line.served
        answer, name, first = await self._once(
            asked, request, lambda: served.answer(request.messages, tools, request.most)
        )
        kind, usage = b"application/json", request.stream_options is not None and request.stream_options.include_usage
        if request.stream:
            kind, parts = b"text/event-stream", list(chat_stream(answer, name, request.model, usage=usage))
        else:
            parts = [msgspec.json.encode(chat_answer(answer, name, request.model))]
        if first:
            asked.took(answer.waited)
        return kind, parts

    async def _tokens(self, asked: _Asked) -> tuple[bytes, Iterable[bytes]]:
        request = read_request(asked.body, TokenRequest)
        served, params = asked.line.served, request.sampling_params
        request.check(served.params.stop_token_ids)
        answer, name, first = await self._once(
            asked, params, lambda: served.complete(request.token_ids, params.max_tokens)
        )
        parts = [msgspec.json.encode(token_answer(answer.completion, name))]
        if first:
            asked.took(answer.waited)
        return b"application/json", parts

    async def _once(
        self, asked: _Asked, params: Any, sample: Callable[[], Coroutine[Any, Any, T]]
    ) -> tuple[T, str, bool]:
        """The turn, its id, and whether the request is the first for it.

        One that comes again gets the turn that was sampled for it, or is being sampled. It says so itself (`_RETRY`),
        or says nothing, and the client of an equal one under way has gone. Of equal turns it gets one whose client has
        gone, each another, else the newest. A client that goes away ends nothing.
        """
        digest = hashlib.sha256(asked.path.encode() + b"\n" + asked.body).digest()
        task: asyncio.Task[T] | None
        if (said := asked.headers.get(_RETRY)) is None:
            task = asked.line.left_turn(digest, done=False)
        elif said.strip() == b"0":
            task = None
        else:
            task = asked.line.left_turn(digest, done=True) or asked.line.answers.get(digest)
        if first := task is None:
            task = asyncio.create_task(_counted(sample(), asked.line.requests), name=f"turn-{next(self._turns)}")
            asked.line.answers[digest] = task
            asked.line.sampling.add(task)
            task.add_done_callback(asked.line.sampling.discard)
            asked.line.requests.overridden += self._is_overridden(params, asked.line.served.params)
        else:
            asked.line.requests.retried += 1
        watching = asyncio.create_task(_leave(asked, digest, task))
        try:
            turn = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise RequestRefused(410, "this conversation has ended") from None
            raise
        except Exception:
            asked.line.forget(digest, task)
            raise
        finally:
            watching.cancel()
        return turn, task.get_name(), first

    def _is_overridden(self, params: Any, used: SamplingParams) -> bool:
        """Whether the client asks for another distribution than the run samples. The first time it is logged."""
        for name, own in (("temperature", used.temperature), ("top_p", used.top_p)):
            given = getattr(params, name)
            if given is not None and given != own:
                if not self._warned:
                    logger.warning("a client asks for %s=%g; the run samples with %g, here and later", name, given, own)
                self._warned = True
                return True
        return False


async def _counted(sampling: Coroutine[Any, Any, T], requests: RequestCounts) -> T:
    turn = await sampling
    requests.answered += 1
    return turn


async def _leave(asked: _Asked, digest: bytes, task: asyncio.Task[Any]) -> None:
    """Note the turn as left once the client goes away."""
    while (await asked.receive())["type"] != "http.disconnect":
        pass
    asked.line.left.setdefault(digest, []).append(task)


_ASKED = ("/v1/chat/completions", "/inference/v1/generate")
