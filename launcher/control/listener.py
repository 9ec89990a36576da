"""A run's end of its control socket: answers commands of its own user while it trains.

A request is one line of JSON, {"command": name, "arguments": {...}}; the answer is one, {"answer": ...} or
{"error": why}. Each connection has one of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from launcher.control.address import LONGEST_LINE, findable, peer_is_own
from launcher.processes.scratch import scratch
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.json_text import parse

logger = logging.getLogger(__name__)

Answering = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Takes a request's arguments and returns what JSON can hold. Raises RLMegatronError that says why it refuses."""
_READ_SECONDS = 5.0  # for a request's line


class Control:
    """The commands that a run answers. Parts of a run offer theirs while they are up.

    ``otherwise`` says, by name, why a command is not offered, and what to do.
    """

    def __init__(self, otherwise: Mapping[str, str] | None = None) -> None:
        self._otherwise = otherwise or {}
        self._commands: dict[str, Answering] = {}
        self._answering = set[asyncio.Task[Any]]()

    @contextlib.asynccontextmanager
    async def offering(self, name: str, command: Answering) -> AsyncIterator[None]:
        """Answer requests for ``name`` while the context is open. Those still at work at its end are cancelled."""
        at_work = set[asyncio.Task[Any]]()

        async def answered(arguments: Mapping[str, Any]) -> object:
            task = asyncio.current_task()
            assert task is not None
            at_work.add(task)
            try:
                return await command(arguments)
            finally:
                at_work.discard(task)

        self._commands[name] = answered
        try:
            yield
        finally:
            del self._commands[name]
            await _cancelled(at_work)

    @contextlib.asynccontextmanager
    async def listening(self, run: Path) -> AsyncIterator[None]:
        """Listen for the run in this folder. Commands that are still at work at the end are cancelled.

        Where no folder for temporary files takes a socket, the run goes on without listening.
        """
        with contextlib.ExitStack() as stack:
            bound = _bound(stack)
            if bound is None:
                yield
                return
            listener, path = bound
            server = await asyncio.start_unix_server(self._answer, sock=listener, limit=LONGEST_LINE)
            try:
                with findable(run, path):
                    yield
            finally:
                server.close()
                await _cancelled(self._answering)

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
            request = parse(line)
            name, arguments = str(request["command"]), dict(request["arguments"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"a request is an object with command and arguments: {error!r}") from error
        if name not in self._commands:
            known = ", ".join(sorted(self._commands)) or "none"
            raise ConfigError(self._otherwise.get(name, f"command {name!r} is not known; this run answers: {known}"))
        logger.info("asked for %s %s", name, arguments)
        return await self._commands[name](arguments)


def _bound(stack: contextlib.ExitStack) -> tuple[socket.socket, Path] | None:
    """A socket and its path, in the machine's temporary folder or in /tmp, until ``stack`` ends; else None."""
    for within in (None, Path("/tmp")):
        with contextlib.ExitStack() as held:
            try:
                path = held.enter_context(scratch(within=within)) / "control"  # a name that cannot be foretold
                listener = held.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(path))  # fails on disks without sockets, and for more than 107 bytes
                path.chmod(0o600)
            except OSError as error:
                logger.info("no control socket in %s: %s", within or "the temporary folder", error)
                continue
            stack.enter_context(held.pop_all())
            return listener, path
    logger.warning("the run answers no commands (rl-megatron engines): neither TMPDIR nor /tmp takes a socket")
    return None


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
