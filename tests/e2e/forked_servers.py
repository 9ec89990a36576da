"""Servers of the in-process engine in forks of a process that has their imports, each below a guard of its own.

A guard of a forked run (tests/e2e/forked.py) is in an interpreter of its own, as always, but that its ``Popen`` asks
`serve` for a fork. A server is killed when its guard is gone, as by the kernel where it is the guard's child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

from launcher.processes import engine_guard
from launcher.processes.parent import die_with_parent

REPOSITORY = Path(__file__).parents[2]
MODULE = "rl_megatron.rollout.servers.embedded.server"
SOCKET, GUARD = "socket", "guard.py"
_MESSAGE_BYTES = 1 << 17  # a command and an environment
_SCRIPT = f"""import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.e2e.forked_servers import be_guard
sys.exit(be_guard(sys.argv[1], sys.argv[2:]))
"""


def serve(folder: Path, ready: Any) -> None:
    """Fork servers for the guards that `GUARD` in ``folder`` starts, until the process that started this one ends."""
    (folder / GUARD).write_text(_SCRIPT)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / SOCKET))
    listener.listen()
    ready.set()
    parent = parent_process()
    assert parent is not None
    with selectors.DefaultSelector() as watched:
        watched.register(listener, selectors.EVENT_READ)
        watched.register(parent.sentinel, selectors.EVENT_READ)
        while True:
            for key, _ in watched.select():
                if key.fileobj == parent.sentinel:
                    shutil.rmtree(folder, ignore_errors=True)
                    return
                if key.fileobj is listener:
                    guard, _ = listener.accept()
                    pid = _fork(guard)
                    end = os.pidfd_open(pid)
                    for either in (guard, end):
                        watched.register(either, selectors.EVENT_READ, (pid, guard, end))
                elif key.fileobj in watched.get_map():  # else both ended at once
                    _end(watched, *key.data)


def _end(watched: selectors.BaseSelector, pid: int, guard: socket.socket, end: int) -> None:
    """A server has ended, or its guard has: tell the one, or kill the other."""
    watched.unregister(guard)
    watched.unregister(end)
    os.kill(pid, signal.SIGKILL)  # it may be a zombie
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with guard, contextlib.suppress(OSError):
        guard.send(json.dumps(code).encode())
    os.close(end)


def _fork(guard: socket.socket) -> int:
    message, descriptors, _, _ = socket.recv_fds(guard, _MESSAGE_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        try:
            command, folder, environment = json.loads(message)
            os.setsid()
            os.umask(0o077)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            die_with_parent()
            sys.argv = command[2:]
            importlib.import_module(MODULE).main()
        except BaseException:  # noqa: BLE001  its guard reports the status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    guard.send(json.dumps(pid).encode())
    return pid


class ForkedServer:
    """What engine_guard.py calls of Popen."""

    def __init__(self, command: list[str], **_: object) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(Path(sys.argv[0]).with_name(SOCKET)))
        message = json.dumps([command, os.getcwd(), dict(os.environ)]).encode()
        with open(os.devnull) as nothing:
            socket.send_fds(self._socket, [message], [nothing.fileno(), 1, 2])
        self.pid: int = json.loads(self._socket.recv(_MESSAGE_BYTES))
        self._code, self._ended = 0, threading.Event()
        threading.Thread(target=self._hear, daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked server", timeout or 0)
        return self._code

    def _hear(self) -> None:
        self._code = json.loads(self._socket.recv(_MESSAGE_BYTES) or b"-9")
        self._ended.set()


def be_guard(host: str, command: list[str]) -> int:
    """engine_guard.py, whose server is a fork if it is `MODULE`; others have imports of their own."""
    if command[1:3] == ["-m", MODULE]:
        setattr(subprocess, "Popen", ForkedServer)  # noqa: B010  an assignment is none of mypy's
    return engine_guard.main(host, command)
