"""The command line in a fork of a process that has its imports, its ranks in forks of that, and its servers in forks
(forked_servers.py): half of a start's CPU time is imports. How a run starts in interpreters of its own is the subject
of the tests that use ``Place.start``."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import entry
from launcher.hosts import local
from launcher.processes import engine_guard
from launcher.processes.environment import die_with_parent, variables
from launcher.wire import Muster
from launcher.worker.forking import BLOCKED_SIGNALS
from tests.e2e import forked_servers
from tests.forks import FORKS, be_node

PROGRAM = Path(sys.executable).with_name("rl-megatron")
NODE = "test-node"  # what the kernel calls the process, 15 characters at most
_PR_SET_NAME = 15
_READY_SECONDS = 600.0  # its process may wait for the imports of all
_ENVIRONMENT_BYTES, _MOST_RANKS = 1 << 17, 64  # of a message, at most
Begin = Callable[[Muster], Any]  # of local.start_node


class Fork:
    """A run of the command line, with what tests call of Popen. All forks have one seed of Python's hashes, which new
    interpreters draw, and run no ``atexit`` handlers."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        output: Path,
        environment: Mapping[str, str],
        before: Callable[[], None] | None = None,
        in_node: Callable[[], None] | None = None,
    ) -> None:
        """``before``: what the controller calls before the command line, and ``in_node`` the process that its ranks
        are forked from before it forks one; they can be pickled."""
        given = (arguments, folder, output, environment, before, in_node, guard())
        self._process = FORKS.Process(target=_run_forked, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, limit: float) -> int:
        self._process.join(limit)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("rl-megatron", limit)
        return code

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@functools.cache
def guard() -> Path:
    """The guard of servers that are forked; one process of its own forks all those of this one's tests."""
    folder, ready = Path(tempfile.mkdtemp(prefix="forks-")), FORKS.Event()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # its process removes it if this one is killed
    FORKS.Process(target=forked_servers.serve, args=(folder, ready), daemon=True).start()
    assert ready.wait(_READY_SECONDS), "the process that servers are forked from does not start"
    return folder / forked_servers.GUARD


def _run_forked(
    arguments: Sequence[str],
    folder: Path,
    output: Path,
    environment: Mapping[str, str],
    before: Callable[[], None] | None,
    in_node: Callable[[], None] | None,
    guard: Path,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    engine_guard.__file__ = str(guard)
    local.start_node = ForkedNode(local.start_node, in_node).begin
    sys.argv = [str(PROGRAM), *arguments]
    if before is not None:
        before()
    entry.main()


class ForkedNode:
    """The process that ranks are forked from. It is forked before the run has threads or sockets, and is the first
    node that the run asks for; it ends with the run."""

    def __init__(self, others: Begin, first: Callable[[], None] | None) -> None:
        self._others, self._begun = others, False
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.returncode: int | None = None
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            self._asked.close()
            code = 1
            try:
                if first is not None:
                    first()
                _be_node(theirs, parent)
                code = 0
            finally:
                os._exit(code)
        theirs.close()

    def begin(self, muster: Muster) -> Any:
        """As ``local.start_node``, which makes the nodes after the first."""
        if self._begun:
            return self._others(muster)
        self._begun = True
        environment = {**os.environ, **variables(threads=muster.call.threads, device=muster.call.device)}
        socket.send_fds(self._asked, [json.dumps([muster.line().decode(), environment]).encode()], muster.stderr)
        return self

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # the thread in `wait` has just reaped it
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _be_node(asked: socket.socket, parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, BLOCKED_SIGNALS)
    die_with_parent()
    if os.getppid() != parent:
        return
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NODE.encode())
    message, stderr, _, _ = socket.recv_fds(asked, _ENVIRONMENT_BYTES, _MOST_RANKS)
    line, environment = json.loads(message)
    asked.close()
    be_node(Muster.read(line), stderr, environment)
