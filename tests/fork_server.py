"""Forks processes for those who ask at a socket: for servers of tests, whose imports are made once.

Programs of other environments load this file by its path; it imports nothing of the repository.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable

_MESSAGE_BYTES = 1 << 17  # a command and an environment


def listening(path: str) -> socket.socket:
    """The socket ``path`` at which to ask."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    return listener


def serve(listener: socket.socket, over: int, fork: Callable[[socket.socket, bytes, list[int]], int]) -> None:
    """Have ``fork`` make a process of each caller's message and descriptors, until ``over`` can be read. A caller gets
    the exit status of its process, which is killed if the caller ends first."""
    with selectors.DefaultSelector() as watched:
        watched.register(over, selectors.EVENT_READ)
        watched.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in watched.select():
                if key.fileobj == over:
                    return
                if key.fileobj is listener:
                    caller, _ = listener.accept()
                    message, descriptors, _, _ = socket.recv_fds(caller, _MESSAGE_BYTES, 3)
                    pid = fork(caller, message, descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    end = os.pidfd_open(pid)
                    for either in (caller, end):
                        watched.register(either, selectors.EVENT_READ, (pid, caller, end))
                elif key.fileobj in watched.get_map():  # else both ended at once
                    _end(watched, *key.data)


def _end(watched: selectors.BaseSelector, pid: int, caller: socket.socket, end: int) -> None:
    """A process has ended, or its caller has: tell the caller, or kill the process."""
    watched.unregister(caller)
    watched.unregister(end)
    os.kill(pid, signal.SIGKILL)  # it may be a zombie
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with caller, contextlib.suppress(OSError):  # it is gone
        caller.send(json.dumps(code).encode())
    os.close(end)
