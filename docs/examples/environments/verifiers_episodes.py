"""Episodes of the verifiers package, in an interpreter of their own that asks the model's endpoint for turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from rl_megatron.environments import marks
from rl_megatron.environments.protocol import AgentFailed, AgentModelClient, EnvironmentStep
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt

FIELD = "verifiers"  # of a row: which task it is
_WORKER = Path(__file__).with_name("verifiers_worker.py")
_TASKS_LIMIT, _CANCEL_LIMIT, _LAST_WORDS_LIMIT = 600.0, 10.0, 1.0  # seconds
_MOST_LINE, _MOST_SAID, _MOST_METRICS = 1 << 24, 1000, 32


class InterpreterFailed(Exception):
    """The other interpreter's process ended, answered what is no answer, or could not do what was asked."""


async def play(task: Prompt, model: AgentModelClient, *, python: str) -> EnvironmentStep:
    """Have ``python`` play the task of a row that write_tasks.py wrote; its reward and metrics."""
    which = task.meta.get(FIELD)
    if not isinstance(which, Mapping):
        raise DataError(f"prompt {task.id!r} has no field {FIELD!r}; write tasks with write_tasks.py")
    said = await interpreter_of(python).ask({**which, "base_url": model.base_url, "api_key": model.api_key})
    metrics = {_name(name): value for name, value in dict(said.get("metrics") or {}).items() if value is not None}
    return EnvironmentStep(reward=said.get("reward"), metrics=dict(list(metrics.items())[:_MOST_METRICS]))


def tasks(
    *, python: str, id: str, size: int, held_out: int, args: Mapping[str, Any] | None = None
) -> tuple[Iterator[Mapping[str, Any]], Iterator[Mapping[str, Any]]]:
    """Rows of the environment's first ``size`` tasks, and of the ``held_out`` after them.

    Raises ConfigError with what the package says.
    """
    which = {"id": id, "args": dict(args or {})}

    async def ask() -> Mapping[str, Any]:
        async with asyncio.timeout(_TASKS_LIMIT):
            return await interpreter_of(python).ask({**which, "count": size + held_out})

    try:
        found = asyncio.run(ask())["tasks"]
    except (AgentFailed, InterpreterFailed, TimeoutError) as error:
        raise ConfigError(f"verifiers in {python}: {error or f'no tasks within {_TASKS_LIMIT:g} s'}") from error
    if len(found) < size + held_out:
        raise ConfigError(f"{id} has {len(found)} tasks, fewer than size={size} and held_out={held_out}")
    rows = [
        {"question": one["question"], "answer": one["answer"] or "(none)", FIELD: {**which, "index": index}}
        for index, one in enumerate(found)
    ]
    return iter(rows[:size]), iter(rows[size:])


class Interpreter:
    """A process of another interpreter, for all trajectories. Started by a thread with a mark of its own, as
    what has a trajectory's is killed after that; it ends when this process does."""

    def __init__(self, python: str) -> None:
        self.ended = threading.Event()
        self._python, self._started = python, threading.Event()
        self._waiting, self._lock = dict[int, Future[Mapping[str, Any]]](), threading.Lock()
        self._numbers, self._said = itertools.count(), b""  # the last that it wrote beside its answers
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()
        self._started.wait()

    async def ask(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the process answers. Raises InterpreterFailed, and AgentFailed with what the package raised.

        A cancelled call is cancelled there too, and a process that does not heed it is killed, with all its calls.
        """
        number, answer = next(self._numbers), Future[Mapping[str, Any]]()
        with self._lock:
            if self.ended.is_set():
                raise InterpreterFailed(self._last_words())
            self._waiting[number] = answer
        self._send({**call, "call": number})
        try:
            said = await asyncio.shield(asyncio.wrap_future(answer))
        except asyncio.CancelledError:
            late = threading.Timer(_CANCEL_LIMIT, self._kill_if_waiting, (number,))
            late.daemon = True
            late.start()  # first: a process that reads nothing blocks whoever writes to it
            self._send({"cancel": number})
            raise
        if "error" in said:
            raise AgentFailed(f"verifiers: {said['error']!s:.{_MOST_SAID}}")
        return said

    def _send(self, line: Mapping[str, Any]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # it has ended, which the reader tells
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()

    def _kill_if_waiting(self, number: int) -> None:
        if number in self._waiting and self._process is not None:
            self._process.kill()

    def _read(self) -> None:
        marks.mark(marks.SHARED)
        try:
            command = [self._python, str(_WORKER)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=dict(os.environ),
            )
        except OSError as error:
            self._said = str(error).encode()
        self._started.set()
        if self._process is not None:
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            listening = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
            listening.start()
            with contextlib.suppress(ValueError, KeyError, TypeError):  # it lies
                while (line := self._process.stdout.readline(_MOST_LINE)).endswith(b"\n"):
                    said = json.loads(line)
                    self._waiting.pop(said["call"]).set_result(said)
            self._process.kill()
            self._process.wait()
            listening.join(_LAST_WORDS_LIMIT)  # it may have left processes, which hold the pipe
        with self._lock:
            self.ended.set()
            left, self._waiting = self._waiting, {}
        for answer in left.values():
            answer.set_exception(InterpreterFailed(self._last_words()))

    def _listen(self, stderr: IO[bytes]) -> None:
        """Read all that the process writes there, so that it never waits for room, and keep the last bytes."""
        with stderr:
            while part := os.read(stderr.fileno(), 1 << 16):
                self._said = (self._said + part)[-_MOST_SAID:]

    def _last_words(self) -> str:
        status = "did not start" if self._process is None else f"ended with status {self._process.returncode}"
        last = self._said.decode(errors="replace").strip()
        return f"the process of environment.options.python={self._python} {status}; it said last: {last}"


_running, _making = dict[str, Interpreter](), threading.Lock()


def interpreter_of(python: str) -> Interpreter:
    """The process of the interpreter; another one where the last has ended."""
    with _making:
        if python not in _running or _running[python].ended.is_set():
            _running[python] = Interpreter(python)
        return _running[python]


def _name(given: str) -> str:
    return re.sub("[^a-z0-9]+", "_", given.lower()).strip("_")[:60] or "unnamed"
