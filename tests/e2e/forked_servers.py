"""Servers of the in-process engine in forks of a process that has their imports, each below a guard of its own.

A guard of a forked run (tests/e2e/forked.py) is in an interpreter of its own, as always, but that its ``Popen`` asks
`serve` for a fork. A server is killed when its guard is gone, as by the kernel where it is the guard's child.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

from launcher.processes import engine_guard
from launcher.processes.environment import die_with_parent
from tests import fork_server

REPOSITORY = Path(__file__).parents[2]
MODULE = "rl_megatron.engines.local.server"
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
    listener, parent = fork_server.listening(str(folder / SOCKET)), parent_process()
    assert parent is not None
    ready.set()
    fork_server.serve(listener, parent.sentinel, _fork)
    shutil.rmtree(folder, ignore_errors=True)


def _fork(guard: socket.socket, message: bytes, descriptors: list[int]) -> int:
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
            sys.argv = command[3:]
            importlib.import_module(MODULE).main()
        except BaseException:  # noqa: BLE001  its guard reports the status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
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
    if command[1:4] == ["-P", "-m", MODULE]:
        setattr(subprocess, "Popen", ForkedServer)  # noqa: B010  an assignment is none of mypy's
    return engine_guard.main(host, command)
