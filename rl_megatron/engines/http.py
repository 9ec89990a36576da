"""Sends JSON over HTTP to one engine server. Distinguishes failures that a retry may fix from others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec

from rl_megatron.engines.engine_token import authorization
from rl_megatron.errors import EngineError
from rl_megatron.files import parse
from rl_megatron.http.client import KEEP_ALIVE_SECONDS, TryAgain, describe_transport, new_client
from rl_megatron.http.token_file import StatusAndBody, TokenFile

T = TypeVar("T")

_PASSING = (408, 429, 503)
_SHOWN = 2000  # characters of a response in an error
_beside = ThreadPoolExecutor(1, thread_name_prefix="decoding")  # decodes large responses outside the event loop


class AttemptFailed(TryAgain):
    """There was no connection, no response in time, or a server error."""


class ResponseTimeout(AttemptFailed):
    """There was a connection, but no response in time."""


class ServerUnreachable(AttemptFailed):
    """There was no connection, or it broke."""


class ConnectionBroken(ServerUnreachable):
    """The connection broke after the request was sent, perhaps because the request crashed the server."""


class ServerBusy(AttemptFailed):
    """The server accepts no request at present."""


class TokenRefused(ServerBusy):
    """The server does not accept the token of a file, which may hold another one later."""


class ServerRefusal(EngineError):
    """The server refuses this request permanently."""


class Unauthorized(EngineError):
    """The server does not accept a token that does not change."""


class TooManyOpenFiles(EngineError):
    """This process cannot open further files, so it has no connection and knows nothing about the server."""


class Server:
    """One engine server at ``url``, without proxies.

    Every request carries ``token``, or the file's token. A response must arrive within ``timeout_seconds``, except for
    requests that wait in the server's queue: their time does not show whether the server works. The tokens that it
    generates do (launcher/servers/supervisor.py).
    """

    def __init__(
        self, url: str, *, token: str | TokenFile | None, timeout_seconds: float, answers: Path | None = None
    ) -> None:
        self.url, self.token, self._limit = url.rstrip("/"), token, timeout_seconds
        self.answers = answers  # folder that its nodes share with this one; None: the folder of the weights
        self.in_flight = 0  # requested completions
        self.paused = False  # its sampling is paused
        self.released = False  # the memory of weights and cache, or of its cache alone, is released
        self.priorities = False  # it orders requests by their priority
        self.features: Mapping[str, object] = {}  # its settings of each feature, by name
        self.salt: str | None = None  # names the weights in each request, if prefixes of others stay in the cache
        self.reclaimed = False  # the weights' memory is allocated again, and the cache's is not yet
        self.checked = asyncio.Lock()  # held during a health check, and while its memory is released
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS
        )
        self._client = new_client(base_url=self.url, limits=limits)

    @contextlib.contextmanager
    def busy(self, completions: int = 1) -> Iterator[None]:
        """Counts a request's completions as in flight."""
        self.in_flight += completions
        try:
            yield
        finally:
            self.in_flight -= completions

    async def post(self, path: str, body: object = None, *, params: Mapping[str, str] | None = None) -> Any:
        """Posts a request. Returns the response's JSON, or None if it is empty. Raises like ``get``."""
        return self._json(path, await self._ask("POST", path, body, params, self._limit))

    async def post_for_text(self, path: str, body: object) -> None:
        """Posts a request and ignores the text of the response. Raises like ``get``."""
        await self._ask("POST", path, body, None, self._limit)

    async def post_sampling(self, path: str, body: object, read: Callable[[bytes], T], *, is_extra: bool = False) -> T:
        """Returns samples or scores for ``body``, decoded by ``read``, without a time limit. Slow decoding runs in a
        thread (``is_extra``). Raises like ``get``, and AttemptFailed if ``read`` raises ValueError."""
        answer = await self._ask("POST", path, body, None, None)
        try:
            return await decode_in_thread(read, answer) if is_extra else read(answer)
        except ValueError as error:
            raise AttemptFailed(f"{self.url}{path}: its answer has another form: {error!s:.300}") from error

    async def post_report(self, path: str, body: object, read: Callable[[bytes], T]) -> T:
        """Returns the ranks' reports, decoded by ``read`` in a thread: a large model's take long. Raises like ``get``,
        and EngineError if ``read`` raises ValueError."""
        answer = await self._ask("POST", path, body, None, self._limit)
        try:
            return await decode_in_thread(read, answer)
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: its answer has another form: {error!s:.300}") from error

    async def get(self, path: str) -> Any:
        """Returns the response's JSON. Raises AttemptFailed, or EngineError for a refusal, with the response."""
        return self._json(path, await self.text(path))

    async def text(self, path: str) -> str:
        """Returns the response as text. Raises like ``get``. Retries once if the connection breaks: the server may have
        just closed it as idle. A dead server refuses the next connection (RFC 9110, 9.2.2)."""
        try:
            answer = await self._ask("GET", path, None, None, self._limit)
        except ConnectionBroken:
            answer = await self._ask("GET", path, None, None, self._limit)
        return answer.decode(errors="replace")

    async def _ask(
        self, method: str, path: str, body: object, params: Mapping[str, str] | None, limit: float | None
    ) -> bytes:
        what = f"{self.url}{path}"
        content = None if body is None else msgspec.json.encode(body)  # long prompts' tokens take json 15 times as long
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(limit):
                status, answer = await self._answered(method, path, headers, content=content, params=params)
        except TimeoutError as error:
            raise ResponseTimeout(f"{what}: no answer within rollout.server.timeout_seconds={limit:g}") from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise _unreachable(what, error) from error
        except httpx2.TransportError as error:
            raise ConnectionBroken(f"{what}: {describe_transport(error)}") from error
        except TryAgain as error:
            raise ServerBusy(f"{what}: {error}") from error
        if isinstance(self.token, TokenFile) and (advice := self.token.refused(status)):
            raise TokenRefused(f"{what}: status {status}: {_shown(answer)}{advice}")
        if status in _PASSING:
            raise ServerBusy(f"{what}: status {status}: {_shown(answer)}")
        if status >= 500:
            raise AttemptFailed(f"{what}: status {status}: {_shown(answer)}")
        if status == 401:
            raise Unauthorized(f"{what}: status {status}: {_shown(answer)}")
        if status >= 300:
            raise ServerRefusal(f"{what}: status {status}: {_shown(answer)}")
        return answer

    async def _answered(self, method: str, path: str, headers: Mapping[str, str], **options: Any) -> StatusAndBody:
        """Returns status and body. Raises TryAgain if a file holds no token, and httpx's errors."""

        async def ask(token: str) -> StatusAndBody:
            given = {**headers, **authorization(token)} if token else headers
            response = await self._client.request(method, path, headers=given, **options)
            return response.status_code, bytes(response.content)

        return await (self.token.answer(ask) if isinstance(self.token, TokenFile) else ask(self.token or ""))

    def _json(self, path: str, text: bytes | str) -> Any:
        try:
            return parse(text) if text else None
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: the answer is not JSON: {text[:80]!r}") from error

    async def status(self, path: str, *, seconds: float) -> int | None:
        """Returns the status of a GET, or None without a response within ``seconds``. Raises TooManyOpenFiles."""
        try:
            async with asyncio.timeout(seconds):
                return (await self._answered("GET", path, {}))[0]
        except (TimeoutError, TryAgain):
            return None
        except httpx2.TransportError as error:
            if isinstance(told := _unreachable(f"{self.url}{path}", error), TooManyOpenFiles):
                raise told from error
            return None

    async def health(self, *, seconds: float) -> int | None:
        """Returns the status of /health like `status`, or 200 without a request while memory is released.

        SGLang samples a token for its response. Its scheduler ends if it must sample one while it releases memory, and
        afterwards it has no weights to sample with. So this first waits for a pending release.
        """
        async with self.checked:
            return 200 if self.released else await self.status("/health", seconds=seconds)

    async def allows_unauthenticated(self) -> bool:
        """True if the server accepts requests without a token. Raises AttemptFailed."""
        async with new_client(base_url=self.url) as stranger:
            try:
                return (await stranger.get("/openapi.json", timeout=self._limit)).status_code not in (401, 403)
            except httpx2.TransportError as error:
                raise _unreachable(self.url, error) from error

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()


async def decode_in_thread(read: Callable[[bytes], T], text: bytes) -> T:
    """Decodes the large response ``text`` with ``read``, in a thread that decodes one at a time."""
    return await asyncio.get_running_loop().run_in_executor(_beside, read, text)


def open_files_error(what: str, error: OSError) -> TooManyOpenFiles | None:
    """Returns the error of a process that can open no more files, or None for another ``error``."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return TooManyOpenFiles(
        f"{what}: this process has no open file left: {error.strerror}; raise the hard limit of open files "
        "(ulimit -Hn), or lower rollout.server.max_concurrent_groups"
    )


def _unreachable(what: str, error: httpx2.TransportError) -> ServerUnreachable | TooManyOpenFiles:
    """Returns the error of a failed connection, by the system's error, which httpx keeps only as a cause."""
    causes: list[BaseException] = [error]
    for one in causes:
        if isinstance(one, OSError) and (none_left := open_files_error(what, one)):
            return none_left
        behind = one.__cause__ or one.__context__
        causes += [*getattr(one, "exceptions", ()), *([behind] if behind else [])]  # a group: an error of each address
    return ServerUnreachable(f"{what}: {describe_transport(error)}")


def _shown(answer: bytes) -> str:
    return answer[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
