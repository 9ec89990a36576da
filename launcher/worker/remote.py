"""One rank that connects back to the controller: `main` is the program that node.py starts, `serve` a Ray actor's."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from launcher.processes import limits
from launcher.processes.engine_guard import interface_of
from launcher.processes.environment import variables
from launcher.processes.parent import die_with
from launcher.wire import channel
from launcher.wire.greetings import Call, Hello, this_node
from launcher.worker.forking import HELD_BACK
from launcher.worker.process import run_worker, say, say_alive, telling


def main(arguments: Sequence[str]) -> None:
    """Run as a rank, under a parent: ``arguments`` are its number and the parent's pid. Standard input is its `Call`.

    It ends within seconds of the controller.
    """
    rank, parent = map(int, arguments)
    die_with(parent)
    with os.fdopen(os.dup(0)) as line, open(os.devnull, "rb") as nothing:
        call = Call(**json.loads(line.readline()))
        os.dup2(nothing.fileno(), 0)
    if call.cpus:
        os.sched_setaffinity(0, call.cpus)
    serve(call, rank)


def serve(call: Call, rank: int) -> None:
    """Run as ``rank`` until the controller requests the end or is gone. Called in a main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)  # one thread waits for them and passes them on
    limits.raise_open_files()
    connection, address = channel.connect(call.host, call.port, bytes.fromhex(call.token), seconds=call.seconds)
    os.environ.update(variables(threads=call.threads, device=call.device))
    interface = interface_of(address)
    assert interface is not None  # the stream leaves through it
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    store = channel.listen(address, backlog=4096) if rank == 0 else None
    hello = Hello(
        rank=rank,
        node=this_node(),
        pid=os.getpid(),
        store=f"{address}:{store.getsockname()[1]}" if store else "",
        step=".".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")),
        role=call.role,
        hindered=call.hindered,
    )
    connection.send_bytes(hello.line())
    with telling(connection):
        threading.Thread(target=_live, args=(connection,), name="alive", daemon=True).start()
        threading.Thread(target=_pass_on, args=(connection,), name="signals", daemon=True).start()
        run_worker(connection, rank, store.detach() if store else None)


def _live(connection: Connection) -> NoReturn:
    """Send heartbeats, and end this process when the controller is gone, even inside a collective."""
    say_alive(connection)
    os._exit(1)


def _pass_on(connection: Connection) -> None:
    """Forward signals to the controller, which decides: Slurm sends SIGTERM to all ranks before preemption."""
    while True:
        say(connection, "signal", signal.Signals(signal.sigwait(HELD_BACK)).name)


if __name__ == "__main__":
    main(sys.argv[1:])
