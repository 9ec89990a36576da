"""Starts the ranks of one node, ``python -m launcher.worker.node``: imports once, then forks them.

It is the task that an srun step has on a node or, on the controller's own machine, the controller's child. The ranks'
call and the run's token arrive on standard input, which srun gives to every task. So the token is in no command line,
no environment and no file. The kernel ends the ranks with this process. A task ends with the first rank that fails. A
child waits for all ranks, since the controller ends it, and the kernel ends it with the controller.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TextIO

from launcher.processes.environment import exit_with_parent, variables
from launcher.processes.guards import ENDING
from launcher.wire import Call, Muster, this_node
from launcher.worker.forking import BLOCKED_SIGNALS, RankProgram, import_all, no_fork_reason, rank_modules, start
from rl_megatron.placement.names import file_stem, rank_label
from rl_megatron.placement.ranks import shares_of_cores

_PEERS_SECONDS = 2.0  # the controller is notified of a rank's end before that of ranks that end because of it


def main() -> None:
    """Starts the ranks that standard input names for this node. Exits like a shell after the first that failed."""
    run(Muster.read(sys.stdin.readline()))


def run(muster: Muster) -> NoReturn:
    """Starts the ranks of this node, and waits for them. Exits like `main`."""
    if muster.parent is not None:
        exit_with_parent(muster.parent)
    os.environ.update(variables(threads=muster.call.threads, device=muster.call.device))
    import_all(rank_modules(muster.call.device))
    sys.exit(_first_failure(_start_all(muster), None if muster.parent is not None else _PEERS_SECONDS))


def _start_all(muster: Muster) -> dict[int, tuple[str, TextIO | None]]:
    """Starts every rank of this node. Returns by pid its name, and its stderr if that is the controller's."""
    ranks, hindered = muster.node_ranks(this_node()), no_fork_reason()
    shares = shares_of_cores(_own_cores() if muster.parent is None else {}, len(ranks))
    for descriptor in muster.stderr:  # processes that this one starts do not inherit it
        os.set_inheritable(descriptor, False)
    outputs = [os.fdopen(descriptor, "w") for descriptor in muster.stderr]
    started: dict[int, tuple[str, TextIO | None]] = {}
    for local, (role, rank) in enumerate(ranks):
        call, name = replace(muster.call, role=role, hindered=hindered, cpus=shares[local]), rank_label(role, rank)
        if outputs:
            pid = _start(rank, call, {2: outputs[local].fileno()}, [file.fileno() for file in outputs])
            started[pid] = name, outputs[local]
            continue
        os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(local))  # the same as under srun
        with (Path(muster.folder) / f"{file_stem(role, rank)}.txt").open("ab") as output:
            started[_start(rank, call, dict.fromkeys((1, 2), output.fileno()))] = name, None
    for number in signal.sigpending() & BLOCKED_SIGNALS:  # arrived before there were ranks to pass it on
        os.kill(next(iter(started)), number)
    return started


def _start(rank: int, call: Call, output: Mapping[int, int], close: Sequence[int] = ()) -> int:
    """Starts one rank, whose standard input is its call. Returns its pid. The other arguments are as in `start`."""
    reading, writing = os.pipe()
    os.write(writing, call.line())  # less than a pipe holds
    os.close(writing)
    with open(reading, "rb") as line:
        arguments = (str(rank), str(os.getpid()))
        program = RankProgram(module="launcher.worker.process", arguments=arguments, files={0: line.fileno(), **output})
        return start(program, call.hindered, close)


def _own_cores() -> Mapping[int, tuple[int, int]]:
    """Returns the package and core of each CPU that Slurm bound this task to; empty if it did not bind it."""
    cpus = os.sched_getaffinity(0)
    if len(cpus) == os.cpu_count() and not os.environ.get("SLURM_CPU_BIND_TYPE", "").startswith("mask"):
        return {}
    return {cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id")) for cpu in cpus}


def _topology(cpu: int, what: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{what}").read_text())
    except OSError:  # a container may hide it
        return cpu


def _first_failure(ranks: Mapping[int, tuple[str, TextIO | None]], patience: float | None) -> int:
    """Waits for the ranks, by pid. Returns 0 if all end well. Otherwise returns the status of the first that failed,
    once the others have ended or had ``patience`` seconds (None: any time) to end."""
    failed, limit = 0, None
    with selectors.DefaultSelector() as waiting:
        for pid in ranks:
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while waiting.get_map() and (ended := waiting.select(limit)):
            for key, _ in ended:
                waiting.unregister(key.fileobj)
                code, (name, output) = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1]), ranks[key.data]
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                if output is not None:
                    with contextlib.suppress(OSError), output:  # the controller is gone
                        output.write(ENDING + how)
                elif code and not failed:
                    print(f"{name} on {this_node()} {how}", file=sys.stderr, flush=True)
                if code and not failed:
                    failed, limit = code if code > 0 else 128 - code, patience
    return failed


if __name__ == "__main__":
    main()
