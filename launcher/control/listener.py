"""A run's end of its control socket: answers commands of its own user while it trains.

A request is one line of JSON, {"command": name, "arguments": {...}}; the answer is one, {"answer": ...} or
{"error": why}. Each connection has one of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.control.address import LONGEST_LINE, findable, peer_is_own
from launcher.processes.scratch import scratch
from rl_megatron.errors import ConfigError, RLMegatronError

logger = logging.getLogger(__name__)

Answering = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Takes a request's arguments and returns what JSON can hold. Raises RLMegatronError that says why it refuses."""
_READ_SECONDS = 5.0  # for a request's line
_LONGEST_PATH = 100  # bytes of a socket's path; Linux takes 107


class Control:
    """The commands that a run answers. Parts of a run offer theirs while they are up.

    ``otherwise`` says, by name, why a command is not offered, and what to do.
    """

    def __init__(self, otherwise: Mapping[str, str] | None = None) -> None:
        self._otherwise = otherwise or {}
        self._commands: dict[str, Answering] = {}
        self._answering = set[asyncio.Task[Any]]()

    @contextlib.contextmanager
    def offering(self, name: str, command: Answering) -> Iterator[None]:
        """Answer requests for ``name`` while the context is open."""
        self._commands[name] = command
        try:
            yield
        finally:
            del self._commands[name]

    @contextlib.asynccontextmanager
    async def listening(self, run: Path) -> AsyncIterator[None]:
        """Listen for the run in this folder. Commands that are still at work at the end are cancelled."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(scratch())  # of this user alone; its name cannot be foretold
            if len(os.fsencode(folder)) > _LONGEST_PATH - 10:
                folder = stack.enter_context(scratch(within=Path("/tmp")))
            path = folder / "control"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            path.chmod(0o600)
            server = await asyncio.start_unix_server(self._answer, sock=listener, limit=LONGEST_LINE)
            try:
                with findable(run, path):
                    yield
            finally:
                server.close()
                for task in self._answering:
                    task.cancel()
                await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection. The command goes on if the other end leaves; nothing of it ends the run."""
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            if not peer_is_own(writer.get_extra_info("socket")):
                return
            answer = json.dumps(await self._answered(reader)).encode() + b"\n"
            if len(answer) > LONGEST_LINE:
                answer = json.dumps({"error": f"the answer is longer than {LONGEST_LINE} bytes"}).encode() + b"\n"
            with contextlib.suppress(ConnectionError):
                writer.write(answer)
                await writer.drain()
        finally:
            self._answering.discard(task)
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader) -> dict[str, object]:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                line = await reader.readuntil(b"\n")
        except (TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return {"error": f"a request is a line of at most {LONGEST_LINE} bytes, sent within {_READ_SECONDS:g} s"}
        try:
            return {"answer": await self._obeyed(line)}
        except RLMegatronError as error:
            return {"error": str(error)}
        except Exception as error:  # it ends the command, not the run
            logger.warning("a command failed: %r", line[:200], exc_info=True)
            return {"error": f"{type(error).__name__}: {error}; log.txt has its traceback"}

    async def _obeyed(self, line: bytes) -> object:
        try:
            request = json.loads(line)
            name, arguments = str(request["command"]), dict(request["arguments"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"a request is an object with command and arguments: {error!r}") from error
        if name not in self._commands:
            known = ", ".join(sorted(self._commands)) or "none"
            raise ConfigError(self._otherwise.get(name, f"command {name!r} is not known; this run answers: {known}"))
        logger.info("asked for %s %s", name, arguments)
        return await self._commands[name](arguments)
