"""The nursery process of a local run: it imports the ranks' common modules once, and forks this machine's ranks.

``python -m launcher.worker.nursery <module>...``, whose standard input is a socket to the controller
(hosts/forks.py). A message of the controller is a rank's role and number, with the descriptors of that rank's
stream and stderr. The answer is ``[pid, null, hindrance]`` (why it is no fork; empty: it is one), and
``[pid, exit code, ""]`` once that rank has ended. The nursery ends with the controller, however that ends, and its
ranks end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
from collections.abc import Sequence

from launcher.processes.parent import die_with_parent
from launcher.worker.forking import Program, hindrance, import_all, start

MESSAGE_BYTES = 4096  # no message is longer


def main(modules: Sequence[str]) -> None:
    """Import, then start a rank for each message, until the controller closes its end."""
    die_with_parent()
    controller = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    import_all(modules)
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
                role, rank = json.loads(message)
                stream, stderr = descriptors
                program = Program(
                    module="launcher.worker.process",
                    arguments=(role, str(rank), str(os.getpid())),
                    files={0: stream, 2: stderr},
                )
                hindered = hindrance()
                pid = start(program, hindered, [waiting.fileno(), *(k.fd for k in waiting.get_map().values())])
                for descriptor in descriptors:
                    os.close(descriptor)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _tell(controller, pid, None, hindered)


def _tell(controller: socket.socket, pid: int, code: int | None, hindered: str = "") -> None:
    with contextlib.suppress(OSError):  # the controller is gone: the next read shows it
        controller.send(json.dumps([pid, code, hindered]).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
