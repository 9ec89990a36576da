"""The nursery process: it imports the ranks' common modules once, and forks this machine's ranks.

``python -m launcher.worker.nursery <module>...``, whose standard input is a socket to the controller
(hosts/forks.py). A message of the controller is a rank's name and number, with the descriptors of that rank's
stream and stderr. The answer is ``[pid, null]``, and ``[pid, exit code]`` once that rank has ended. The nursery ends
with the controller, however that ends, and its ranks end with it.

So that forks are safe it only imports: it starts no thread, runs no kernel and touches no GPU.
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
    """Import, then fork a rank for each message, until the controller closes its end."""
    nursery = os.getpid()
    die_with_parent()
    controller = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    quieten()
    for module in modules:
        with contextlib.suppress(BaseException):  # a rank raises it again, and reports it to the controller
            importlib.import_module(module)
    gc.freeze()  # ranks' garbage collections skip it, so its pages stay shared
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
    with contextlib.suppress(OSError):  # the controller is gone: the next read shows it
        controller.send(json.dumps([pid, code]).encode())


def _be(name: str, rank: int, stream: int, stderr: int, nursery: int, inherited: Sequence[int]) -> NoReturn:
    """Run as that rank until its end."""
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
