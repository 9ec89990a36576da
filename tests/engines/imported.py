"""Forks servers of an engine, each below its guard, from a process that has done the engine's imports: these take 13
seconds of CPU time, of vLLM as of SGLang (AMD EPYC without AVX-512).

Run by an engine's interpreter (forked.py). Guard and server are as where a run starts them, the server a child of the
guard, in sessions of their own; but their command line in /proc is written over, and their environment there is that of
this process. Forks are sound while OpenMP has one thread, as the tests run.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from setproctitle import getproctitle, setproctitle


def main(module: str, guard_file: str, path: str, *imports: str) -> None:
    """Serve forks of servers ``module`` at the socket ``path`` until the standard input ends."""
    begun, ready = dict(os.environ), os.dup(1)
    os.dup2(2, 1)  # imports may print
    setproctitle(getproctitle())  # it finds its room between arguments and environment while nobody has changed that
    server = importlib.import_module(module)
    for name in imports:
        importlib.import_module(name)
    assert threading.active_count() == 1, f"forks of threads: {threading.enumerate()}"
    guard, cores = _loaded(guard_file), os.sched_getaffinity(0)
    fork_server = _loaded(str(Path(__file__).parents[1] / "fork_server.py"))
    made = {name: value for name, value in os.environ.items() if begun.get(name) != value}
    forks = _Forks(server, made, changed=made.keys() & begun.keys())
    gc.collect()
    gc.freeze()
    listener = fork_server.listening(path)
    os.write(ready, b"ready\n")
    fork_server.serve(listener, 0, partial(_fork, listener, guard, forks, cores))


def _loaded(path: str) -> ModuleType:
    """The module of a file that imports nothing of its package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fork(
    listener: socket.socket,
    guard: ModuleType,
    forks: _Forks,
    cores: set[int],
    asked: socket.socket,
    message: bytes,
    descriptors: list[int],
) -> int:
    """Fork a guard, whose server is a fork of it."""

    def run() -> int:
        host, command, folder, environment = json.loads(message)
        os.setsid()
        os.sched_setaffinity(0, cores)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for mine in (asked, listener):
            mine.close()
        setproctitle(f"engine_guard.py {host}")
        guard.subprocess = forks  # type: ignore[attr-defined]
        status: int = guard.main(host, command)
        return status

    pid = os.fork()
    if pid == 0:
        _leave(run)
    return pid


class _Forks:
    """What the guard calls of ``subprocess``."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, server: ModuleType, made: Mapping[str, str], changed: Set[str]) -> None:
        """``made``: variables that imports set, of which they ``changed`` some."""
        self._server, self._made, self._changed = server, made, changed

    def Popen(  # noqa: N802
        self, command: list[str], *, preexec_fn: Callable[[], None], env: Mapping[str, str], **_: object
    ) -> _Forked:
        made = {name: value for name, value in self._made.items() if name in self._changed or name not in env}
        return _Forked(self._server, command, preexec_fn, {**env, **made})


class _Forked:
    """What the guard calls of ``Popen``."""

    def __init__(
        self, server: ModuleType, command: list[str], before: Callable[[], None], environment: Mapping[str, str]
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:

            def run() -> int:
                os.setsid()
                with open(os.devnull) as nothing:
                    os.dup2(nothing.fileno(), 0)
                before()
                os.environ.update(environment)
                sys.path[0] = environment["PYTHONPATH"].split(os.pathsep)[0]
                tempfile.tempdir = None  # that of the environment
                sys.argv = [command[0], *command[4:]]
                setproctitle(" ".join(command))
                server.main()
                return 0

            _leave(run)
        self._end, self._reaped = os.pidfd_open(self.pid), threading.Lock()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        with selectors.DefaultSelector() as one:
            one.register(self._end, selectors.EVENT_READ)
            if not one.select(timeout):
                raise subprocess.TimeoutExpired("a forked server", timeout or 0)
        with self._reaped:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _leave(run: Callable[[], int]) -> NoReturn:
    """Run what a process is for, and end it as an interpreter ends."""
    code = 1
    try:
        code = run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  as at an interpreter's top
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    main(*sys.argv[1:])
