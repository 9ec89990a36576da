"""The task of one node in a role's srun step, ``python -m launcher.worker.node``: imports once, then starts the ranks.

The ranks' call and the job's token arrive on standard input, which srun gives to every task, so that the token is in no
command line, no environment and no file. The kernel ends the ranks with this process, which ends with the first of them
that fails.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.processes.environment import variables
from launcher.wire.greetings import Call, Muster, this_node
from launcher.worker.forking import HELD_BACK, Program, hindrance, import_all, modules_of, start
from rl_megatron.placement.names import called, file_stem
from rl_megatron.placement.ranks import shares_of_cores

_PEERS_SECONDS = 2.0  # the controller is notified of a rank's end before that of ranks that end because of it


def main() -> None:
    """Start the ranks of this node, and wait for them. Exits as a shell would after the first that failed."""
    muster = Muster.read(sys.stdin.readline())
    os.environ.update(variables(threads=muster.call.threads, device=muster.call.device))
    import_all(modules_of(muster.call.device))
    sys.exit(_first_failure(_start_all(muster)))


def _start_all(muster: Muster) -> dict[int, str]:
    """Start every rank of this node. Returns their names by pid."""
    ranks, hindered = muster.ranks_of(this_node()), hindrance()
    shares = shares_of_cores(_own_cores(), len(ranks))
    started = {}
    for local, rank in enumerate(ranks):
        os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(local))  # as if srun had started it
        call = muster.call.to_rank(hindered, shares[local])
        started[_start(rank, call, Path(muster.folder), hindered)] = called(call.role, rank)
    for number in signal.sigpending() & HELD_BACK:  # arrived before there were ranks to pass it on
        os.kill(next(iter(started)), number)
    return started


def _start(rank: int, call: Call, folder: Path, hindered: str) -> int:
    """Start one rank, whose standard input is its call and whose output goes to its file. Returns its pid."""
    reading, writing = os.pipe()
    os.write(writing, call.line())  # less than a pipe holds
    os.close(writing)
    with open(reading, "rb") as line, (folder / f"{file_stem(call.role, rank)}.txt").open("ab") as output:
        files = {0: line.fileno(), 1: output.fileno(), 2: output.fileno()}
        program = Program(module="launcher.worker.remote", arguments=(str(rank), str(os.getpid())), files=files)
        return start(program, hindered)


def _own_cores() -> Mapping[int, tuple[int, int]]:
    """The package and core of each CPU that Slurm bound this task to; empty if it did not bind it."""
    cpus = os.sched_getaffinity(0)
    if len(cpus) == os.cpu_count() and not os.environ.get("SLURM_CPU_BIND_TYPE", "").startswith("mask"):
        return {}
    return {cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id")) for cpu in cpus}


def _topology(cpu: int, what: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{what}").read_text())
    except OSError:  # a container may hide it
        return cpu


def _first_failure(ranks: Mapping[int, str]) -> int:
    """Wait for the ranks, by pid. Returns 0 once all have ended well, else the status of the first that failed, once
    the others have ended or had time to."""
    failed, limit = 0, None
    with selectors.DefaultSelector() as waiting:
        for pid in ranks:
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while waiting.get_map() and (ended := waiting.select(limit)):
            for key, _ in ended:
                waiting.unregister(key.fileobj)
                code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                if code and not failed:
                    failed, limit = code if code > 0 else 128 - code, _PEERS_SECONDS
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    print(f"{ranks[key.data]} on {this_node()} {how}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    main()
