"""The endpoint of a run's conversations: an HTTP server on loopback, in the event loop.

It is an ASGI application with limits for bodies. Each conversation has a key, which says who may ask.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import resource
import secrets
import socket
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_megatron.agents.conversation.messages import UnsupportedMessages
from rl_megatron.agents.endpoint.shapes import (
    ChatRequest,
    ConversationHandler,
    RequestRejected,
    TokenRequest,
    chat_answer,
    chat_stream,
    models,
    refused_body,
    token_answer,
)
from rl_megatron.errors import EngineError
from rl_megatron.types import SamplingParams

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
_BODY_SECONDS = 30.0
_READ_ON = 4  # times as much is read and dropped, so that its client reads why

ReceivePart = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendPart = Callable[[MutableMapping[str, Any]], Awaitable[None]]
R = TypeVar("R", bound=msgspec.Struct)


async def read_body(headers: Mapping[bytes, bytes], receive: ReceivePart) -> bytes:
    """Returns the body of a request. Raises RequestRejected if it is too long, ends early or takes over 30 seconds."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await _body(headers, receive)
    except TimeoutError as error:
        raise RequestRejected(408, f"the body was not there within {_BODY_SECONDS:g} s") from error


async def _body(headers: Mapping[bytes, bytes], receive: ReceivePart) -> bytes:
    parts, have, more = list[bytes](), 0, True
    said = headers.get(b"content-length", b"0")
    too_long = not said.isdigit() or int(said) > MAX_BODY_BYTES
    while more and have <= _READ_ON * MAX_BODY_BYTES:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise RequestRejected(400, "the body ended early")
        part, more = event.get("body", b""), event.get("more_body", False)
        have += len(part)
        too_long = too_long or have > MAX_BODY_BYTES
        if too_long:
            parts.clear()
        else:
            parts.append(part)
    if too_long:
        raise RequestRejected(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


def read_request(body: bytes, kind: type[R]) -> R:
    """Returns the request in a body. Raises RequestRejected."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(400, f"the body is no request of this path: {error}") from error


def find_path(scope: Mapping[str, Any], methods: Mapping[str, str]) -> str:
    """Returns the path of a request. Raises RequestRejected for one that ``methods`` lacks, or by another method."""
    path: str = scope["path"]
    if (wanted := methods.get(path)) is None:
        raise RequestRejected(404, f"there is no {path!r:.100}; there are {', '.join(sorted(methods))}")
    if scope["method"] != wanted:
        raise RequestRejected(405, f"{path} takes {wanted}, not {scope['method']}")
    return path


async def respond(send: SendPart, status: int, headers: Mapping[bytes, bytes], parts: Iterable[bytes]) -> None:
    """Sends an answer as one body."""
    body = b"".join(parts)
    length = {b"content-length": str(len(body)).encode()}
    await send({"type": "http.response.start", "status": status, "headers": [*{**headers, **length}.items()]})
    await send({"type": "http.response.body", "body": body})


_MOST_ENDED = 65_536  # keys that are remembered, to say that their conversation has ended


@dataclass(slots=True, kw_only=True)
class RequestCounts:
    """Counts of a conversation's requests."""

    answered: int = 0  # turns that were sampled
    retried: int = 0  # requests that got a turn that was sampled for an earlier one
    refused: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class OpenConversation:
    """One open conversation, its answers by the digest of their request, and all turns that are being sampled."""

    served: ConversationHandler
    requests: RequestCounts = field(default_factory=RequestCounts)
    answers: dict[bytes, asyncio.Task[Any]] = field(default_factory=dict)
    sampling: set[asyncio.Task[Any]] = field(default_factory=set)
    left: dict[bytes, list[asyncio.Task[Any]]] = field(default_factory=dict)  # request digest -> turns without a client

    def left_turn(self, digest: bytes, *, done: bool) -> asyncio.Task[Any] | None:
        """Returns the first turn without a client for an equal request; ``done``: also if it is sampled."""
        turns = [task for task in self.left.pop(digest, ()) if done or not task.done()]
        if len(turns) > 1:
            self.left[digest] = turns[1:]
        return turns[0] if turns else None

    def forget(self, digest: bytes, failed: asyncio.Task[Any]) -> None:
        """Forgets a turn that failed, so that no request is answered with it."""
        if self.answers.get(digest) is failed:
            del self.answers[digest]
        if turns := [task for task in self.left.pop(digest, ()) if task is not failed]:
            self.left[digest] = turns

    def end(self) -> None:
        """Cancels the turns that are being sampled."""
        for task in self.sampling:
            task.cancel()


class ConversationRegistry:
    """Keys of open conversations, by their digests: no comparison of a key depends on another's first characters."""

    def __init__(self) -> None:
        self._lines: dict[bytes, OpenConversation] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def open(self, served: ConversationHandler) -> str:
        """Opens the conversation. Returns its key of 256 random bits."""
        key = secrets.token_hex(32)
        self._lines[_digest(key)] = OpenConversation(served=served)
        return key

    def close(self, key: str) -> None:
        """Ends the key's conversation; it may have ended already."""
        digest = _digest(key)
        line = self._lines.pop(digest, None)
        if line is not None:
            line.end()
        self._ended[digest] = None
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def requests(self, key: str) -> RequestCounts:
        """Returns the counts of the key's conversation, which is open."""
        return self._lines[_digest(key)].requests

    def line(self, headers: Mapping[bytes, bytes]) -> OpenConversation:
        """Returns a request's conversation. Raises RequestRejected: 401 for no or a foreign key, 410 after its end."""
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise RequestRejected(401, "no key; send the conversation's as Authorization: Bearer")
        digest = _digest(key.strip())
        if (line := self._lines.get(digest)) is not None:
            return line
        if digest in self._ended:
            raise RequestRejected(410, "this conversation has ended")
        raise RequestRejected(401, "the key is no conversation's")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_RETRY = b"x-stainless-retry-count"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatCall:
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    receive: ReceivePart  # returns the parts after the body
    line: OpenConversation


class Application:
    """ASGI: one HTTP request a call."""

    def __init__(self, keys: ConversationRegistry) -> None:
        self._keys, self._turns, self._warned = keys, itertools.count(1), False

    async def __call__(self, scope: Mapping[str, Any], receive: ReceivePart, send: SendPart) -> None:
        """Answers, or refuses with a status and OpenAI's form of an error."""
        status, headers = 200, dict[bytes, bytes]()
        line: OpenConversation | None = None
        try:
            line = self._keys.line(dict(scope["headers"]))
            kind, parts = await self._answer(scope, receive, line)
        except (
            RequestRejected,
            UnsupportedMessages,
            RecursionError,
        ) as error:  # read, but too deep to be written again
            status = error.status if isinstance(error, RequestRejected) else 400
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
        path = find_path(scope, {"/v1/models": "GET", "/health": "GET"} | dict.fromkeys(_ASKED, "POST"))
        if path == "/health":
            return b"application/json", [b'{"status":"ok"}']
        if path == "/v1/models":
            return b"application/json", [msgspec.json.encode(models(line.served.max_length))]
        body = await read_body(headers, receive)
        asked = _ChatCall(path=path, headers=headers, body=body, receive=receive, line=line)
        return await (self._chat(asked) if path == _ASKED[0] else self._tokens(asked))

    async def _chat(self, call: _ChatCall) -> tuple[bytes, Iterable[bytes]]:
        request = read_request(call.body, ChatRequest)
        request.check()
        tools = () if request.tool_choice == "none" else request.tools or ()
        served = call.line.served
        answer, name = await self._once(call, request, lambda: served.answer(request.messages, tools, request.limit))
        kind, usage = b"application/json", request.stream_options is not None and request.stream_options.include_usage
        if request.stream:
            kind, parts = b"text/event-stream", list(chat_stream(answer, name, request.model, usage=usage))
        else:
            parts = [msgspec.json.encode(chat_answer(answer, name, request.model))]
        return kind, parts

    async def _tokens(self, call: _ChatCall) -> tuple[bytes, Iterable[bytes]]:
        request = read_request(call.body, TokenRequest)
        served, params = call.line.served, request.sampling_params
        request.check(served.params.stop_token_ids)
        answer, name = await self._once(call, params, lambda: served.complete(request.token_ids, params.max_tokens))
        return b"application/json", [msgspec.json.encode(token_answer(answer, name))]

    async def _once(self, call: _ChatCall, params: Any, sample: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, str]:
        """Returns the turn and its id.

        A repeated request gets the turn that was sampled for it, or is being sampled. It says so itself (`_RETRY`), or
        it says nothing and the client of an equal pending turn has gone. Of equal turns it gets one without a client,
        each request another, else the newest. A client that goes away ends nothing.
        """
        digest = hashlib.sha256(call.path.encode() + b"\n" + call.body).digest()
        task: asyncio.Task[T] | None
        if (said := call.headers.get(_RETRY)) is None:
            task = call.line.left_turn(digest, done=False)
        elif said.strip() == b"0":
            task = None
        else:
            task = call.line.left_turn(digest, done=True) or call.line.answers.get(digest)
        if task is None:
            task = asyncio.create_task(_counted(sample(), call.line.requests), name=f"turn-{next(self._turns)}")
            call.line.answers[digest] = task
            call.line.sampling.add(task)
            task.add_done_callback(call.line.sampling.discard)
            self._warn_of_others(params, call.line.served.params)
        else:
            call.line.requests.retried += 1
        watching = asyncio.create_task(_leave(call, digest, task))
        try:
            turn = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise RequestRejected(410, "this conversation has ended") from None
            raise
        except Exception:
            call.line.forget(digest, task)
            raise
        finally:
            watching.cancel()
        return turn, task.get_name()

    def _warn_of_others(self, params: Any, used: SamplingParams) -> None:
        """Logs the first time that a client asks for another distribution than the run samples."""
        for name, own in (("temperature", used.temperature), ("top_p", used.top_p)):
            given = getattr(params, name)
            if given is not None and given != own and not self._warned:
                logger.warning("a client asks for %s=%g; the run samples with %g, here and later", name, given, own)
                self._warned = True


async def _counted(sampling: Coroutine[Any, Any, T], requests: RequestCounts) -> T:
    turn = await sampling
    requests.answered += 1
    return turn


async def _leave(call: _ChatCall, digest: bytes, task: asyncio.Task[Any]) -> None:
    """Notes the turn as left once the client goes away."""
    while (await call.receive())["type"] != "http.disconnect":
        pass
    call.line.left.setdefault(digest, []).append(task)


_ASKED = ("/v1/chat/completions", "/inference/v1/generate")


_CLOSING_SECONDS = 2
_BACKLOG = 1024
_HEAD_SECONDS = 30.0  # limit for a head to arrive, from the beginning of its connection or its own


class Endpoint:
    """Serves conversations under a key each on 127.0.0.1, from the first one on until its event loop ends, or `stop`.

    Its methods are called in that event loop.
    """

    def __init__(self) -> None:
        self._keys = ConversationRegistry()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._base_url = ""

    def open(self, conversation: ConversationHandler) -> tuple[str, str]:
        """Returns ``(base_url, api_key)``, at which the conversation is until `close`."""
        if self._serving is None or self._serving.done():
            self._listen()
        return self._base_url, self._keys.open(conversation)

    def requests(self, api_key: str) -> RequestCounts:
        """Returns the counts of requests so far in the key's conversation, which is open."""
        return self._keys.requests(api_key)

    def close(self, api_key: str) -> None:
        """Ends a key's conversation and gives up its turns that are being sampled."""
        self._keys.close(api_key)

    def _listen(self) -> None:
        """Listens, so that the kernel keeps clients until they are served."""
        # With the protocol named, asyncio sets TCP_NODELAY; without it an answer's second packet waits 40 ms.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.bind(("127.0.0.1", 0))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        self._base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(
            Application(self._keys),
            lifespan="off",
            ws="none",
            http=BoundedProtocol,
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
            backlog=BoundedProtocol.backlog(),
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(_serve(self._server, listening), name="endpoint")

    async def stop(self) -> None:
        """Stops listening; pending requests have 2 seconds."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


async def _serve(server: uvicorn.Server, listening: socket.socket) -> None:
    with listening:
        try:
            await server.serve(sockets=[listening])
        except Exception:  # its clients find no server there
            logger.exception("the endpoint ends")


class BoundedProtocol(H11Protocol):
    """Closes connections that ask nothing, which need no key to be there, and those whose next head never ends.

    So many may come that the process has no file left: beyond their share each new one takes the place of another.
    """

    files_share = 4
    """Connections have at most one in this many of the process's files."""

    @classmethod
    def max_connections(cls) -> int:
        """Returns how many connections there may be, idle and busy."""
        return _max_files() // cls.files_share

    @staticmethod
    def backlog() -> int:
        """Returns how many connections asyncio may accept before it counts the first. At most a quarter of the files:
        that is left where half of them are counted connections."""
        return min(_BACKLOG, _max_files() // 4)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = self.loop.call_later(_HEAD_SECONDS, self._close_unasked)
        if len(self.connections) > self.max_connections():
            self._make_room()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_waiting():
            self._cancel_timer()
        elif self._late is None:  # a limit for the rest of this head; between requests uvicorn itself counts
            self._late = self.loop.call_later(_HEAD_SECONDS, self._close_unasked)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _is_waiting(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete  # uvicorn's, of the last request

    def _make_room(self) -> None:
        """Closes a connection on which no request is being answered: this one, if there is no other."""
        others = (other for other in self.connections if isinstance(other, BoundedProtocol) and other is not self)
        idle = (other for other in others if other._is_waiting() and not other.transport.is_closing())
        next(idle, self).transport.close()

    def _cancel_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close_unasked(self) -> None:
        self._late = None
        if self._is_waiting():
            self.transport.close()


def _max_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class _Server(uvicorn.Server):
    """Leaves the process's signals to the run, whose Ctrl-C uvicorn would take."""

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield
