"""The process of one rank, which serves calls over a stream. It has learner shard, engine replica and weight transport,
or only the shard of a critic or a reference.

It connects back to the controller, and serves one call at a time, in the order sent. `main` is the program that node.py
starts, `serve` a Ray actor's.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NoReturn

from launcher import wire
from launcher.processes import limits, stacks
from launcher.processes.engine_guard import find_interface
from launcher.processes.environment import exit_with_parent, gc_disabled, missing_order_variables, variables
from launcher.wire import STACKS, Call, Hello, Setup, this_node
from launcher.worker.forking import BLOCKED_SIGNALS, silence_warnings
from launcher.worker.learner_rank import LearnerRank
from launcher.worker.models import RankModels, is_out_of_memory, with_memory_notes
from rl_megatron.errors import RLMegatronError
from rl_megatron.observability import activity, timeline
from rl_megatron.observability.timeline import RankTimed
from rl_megatron.placement.names import LEARNER, file_stem, rank_label
from rl_megatron.user_code import add_import_folder

_SENDING = threading.Lock()  # one message at a time into the pipe
Calls = SimpleQueue[tuple[int, wire.Message] | None]
"""Each with its arrival, in the nanoseconds of ``timeline.now``; None marks the end."""


def main(arguments: Sequence[str]) -> None:
    """Runs as a rank, under a parent: ``arguments`` are its number and the parent's pid. Standard input is its `Call`.

    It ends within seconds of the controller.
    """
    rank, parent = map(int, arguments)
    exit_with_parent(parent)
    with os.fdopen(os.dup(0)) as line, open(os.devnull, "rb") as nothing:
        call = Call(**json.loads(line.readline()))
        os.dup2(nothing.fileno(), 0)
    if call.cpus:
        os.sched_setaffinity(0, call.cpus)
    serve(call, rank)


def serve(call: Call, rank: int) -> None:
    """Runs as ``rank`` until the controller requests the end or is gone. Called in a main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)  # one thread waits for them and passes them on
    limits.raise_open_files()
    connection, address = wire.connect(call.host, call.port, bytes.fromhex(call.token), seconds=call.seconds)
    os.environ.update(variables(threads=call.threads, device=call.device))
    interface = find_interface(address)
    assert interface is not None  # the stream leaves through it
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    store = wire.listen(address, backlog=4096) if rank == 0 and call.store else None
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
    multiprocessing.current_process().name = rank_label(call.role, rank)
    with reporting_errors(connection):
        threading.Thread(target=_live, args=(connection,), name="alive", daemon=True).start()
        threading.Thread(target=_pass_on, args=(connection,), name="signals", daemon=True).start()
        run_worker(connection, rank, store.detach() if store else None)


def _live(connection: Connection) -> NoReturn:
    """Sends heartbeats, and ends this process when the controller is gone, even inside a collective."""
    send_heartbeats(connection)
    os._exit(1)


def _pass_on(connection: Connection) -> None:
    """Forwards signals to the controller, which decides: Slurm sends SIGTERM to all ranks before preemption."""
    while True:
        send_message(connection, "signal", signal.Signals(signal.sigwait(BLOCKED_SIGNALS)).name)


def run_worker(connection: Connection, rank: int, store: int | None = None) -> None:
    """Serves the controller until it requests the end or hangs up. Errors are raised.

    ``store``: see ``world.join``.
    """
    silence_warnings()
    with gc_disabled():
        import rl_megatron.learner.megatron  # noqa: F401  slow, so it runs while the controller still prepares

    try:
        message = wire.receive(connection)
    except EOFError:  # the controller closed the stream
        return
    setup: Setup = wire.unpack(message)
    add_import_folder(setup.code)
    if setup.config.learner.deterministic:
        os.environ.update(missing_order_variables(os.environ))
    from rl_megatron.observability.log import run_log

    if setup.stacks is not None:
        name = file_stem(setup.role, rank)
        stacks.register(setup.stacks / f"{name}.txt", silence=0.45 * setup.config.learner.timeout_seconds)
    calls: Calls = SimpleQueue()
    threading.Thread(target=_hear, args=(connection, calls), name="hear", daemon=True).start()
    logged = run_log(setup.run_folder, role="rank" if setup.role == LEARNER else setup.role, rank=rank)
    with logged, with_memory_notes(setup, rank):
        worker = (LearnerRank if setup.role == LEARNER else RankModels)(setup, rank, store)
        send_message(connection, "ok", worker.gpu)
        _serve(connection, worker, calls)


@contextlib.contextmanager
def reporting_errors(connection: Connection) -> Iterator[None]:
    """Sends the controller any exception that ends this process or one of its threads, including BaseExceptions, which
    torch raises for failed checkpoints."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001  a process boundary: the controller shows it with the rank
        with contextlib.suppress(OSError):  # the controller is gone
            if isinstance(error, RLMegatronError):
                send_message(connection, "refused", error)
            else:
                first = traceback.format_exception_only(error)[0].splitlines()[0]
                said = "\n".join((first, *getattr(error, "__notes__", ()), traceback.format_exc()))
                send_message(connection, "raised" if _machines(error) else "erred", said)


def _machines(error: BaseException) -> bool:
    """True if the machine or a peer may be the cause: errors of NCCL, gloo, CUDA and files, except out of memory."""
    return isinstance(error, RuntimeError | OSError) and not is_out_of_memory(error)


def _hear(connection: Connection, calls: Calls) -> None:
    """Queues calls. Writes stacks immediately when the controller requests them."""
    with contextlib.suppress(EOFError, OSError):  # the controller closed the stream
        while True:
            message = wire.receive(connection)
            if message == STACKS:
                stacks.dump()
            else:
                calls.put((timeline.now(), message))
    calls.put(None)


def _serve(connection: Connection, worker: RankModels, calls: Calls) -> None:
    counts = Counter[str]()
    while (call := calls.get()) is not None:
        arrived, message = call
        name, arguments = wire.unpack(message)
        counts[name] += 1
        activity.begin(name, counts[name])
        if name not in worker.CALLS:
            raise RLMegatronError(f"worker has no call {name!r}; it has {', '.join(worker.CALLS)}")
        answer = getattr(worker, name)(*arguments)
        activity.rest()
        send_message(connection, "ok", answer, timeline.timed(arrived, worker.peak))
        if name == "close":
            return


def send_message(connection: Connection, status: str, value: object, timed: RankTimed | None = None) -> None:
    """Sends one message to the controller, from any thread; ``timed`` goes with an answer."""
    message = wire.pack((status, value, timed))
    with _SENDING:
        wire.send(connection, message)


def send_heartbeats(connection: Connection) -> None:
    """Sends a heartbeat each second, with the activity, so that the controller can tell a long step from a hang."""
    with reporting_errors(connection):
        while True:
            send_message(connection, "alive", activity.now())
            stacks.postpone_stack_dump()
            time.sleep(1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
