"""The process that this machine's ranks are forked from: what they all import, it imports once.

``python -m launcher.worker.nursery <module>...``, whose standard input is a socket to the controller
(hosts/forks.py). A message of the controller's is a rank's name and number, with the descriptors of that rank's
stream and of its stderr; the answer is ``[pid, null]``, and ``[pid, exit code]`` once that rank has ended. It ends
with the controller, however that ends, and ranks with it.

So that its forks are sound it imports and does nothing else: no thread, no kernel, no look at a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import selectors
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from launcher.processes.last_words import speak_into
from launcher.processes.parent import die_with_parent
from launcher.worker.process import quieten, serve_forked

MESSAGE_BYTES = 4096  # no message is longer


def main(modules: Sequence[str]) -> None:
    """Import, then fork a rank a message, until the controller closes its end."""
    nursery = os.getpid()
    die_with_parent()
    controller = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    quieten()
    for module in modules:
        with contextlib.suppress(BaseException):  # a rank raises it again, and tells the controller
            importlib.import_module(module)
    gc.freeze()  # ranks' collections leave it, and its pages stay shared
    with selectors.DefaultSelector() as waiting:
        waiting.register(controller, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not controller:
                    _, status = os.waitpid(key.data, 0)
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    _tell(controller, key.data, os.waitstatus_to_exitcode(status))
                    continue
                message, descriptors, _, _ = socket.recv_fds(controller, MESSAGE_BYTES, 2)
                if not message:
                    return
                pid = os.fork()
                if pid == 0:
                    inherited = [k.fd for k in waiting.get_map().values()]
                    waiting.close()
                    name, rank = json.loads(message)
                    stream, stderr = descriptors
                    _be(name, rank, stream, stderr, nursery, inherited)
                for descriptor in descriptors:
                    os.close(descriptor)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _tell(controller, pid, None)


def _tell(controller: socket.socket, pid: int, code: int | None) -> None:
    with contextlib.suppress(OSError):  # it is gone: the next read says so
        controller.send(json.dumps([pid, code]).encode())


def _be(name: str, rank: int, stream: int, stderr: int, nursery: int, inherited: Sequence[int]) -> NoReturn:
    """Be that rank to the end."""
    code = 1
    try:
        die_with_parent()
        speak_into(stderr)
        if os.getppid() == nursery:  # else it was killed before that call
            for descriptor in inherited:
                os.close(descriptor)
            multiprocessing.current_process().name = name
            serve_forked(Connection(stream), rank)
            code = 0
    except BaseException:  # noqa: BLE001  the process boundary: log.txt and the terminal get it
        traceback.print_exc()
    finally:
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                output.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
