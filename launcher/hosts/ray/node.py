"""One node of a Ray cluster on a Slurm allocation: ``srun ... python -m launcher.hosts.ray.node``, a task a node.

It starts Ray, and ends all of it when its standard input closes; srun closes it however the controller ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from launcher.hosts.slurm.allocation import Allocation, cores_option
from launcher.processes.environment import adopt_orphans, die_with_parent
from launcher.processes.guards import held_ports
from launcher.processes.scratch import lock_against_tmpfiles
from launcher.wire import this_node
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.files import private_folder
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import RankPlacement
from rl_megatron.placement.seats import ServerPlacement

RAYLET_SECONDS = 30.0  # `raylet_start_wait_time_s` in ray/_private/node.py of Ray 2.60
COMPLETE = b"\n"  # the controller's line once the cluster has all its nodes
OBJECT_STORE_BYTES = 100_000_000  # almost unused
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # ranks choose among all GPUs of their node
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",  # the head waits for its parts even without a dashboard
    "RAY_worker_niceness": "0",  # else ranks have a lower priority than other processes
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill ranks if another job fills the node
    "RAY_kill_child_processes_on_worker_exit": "0",  # guards end by themselves, and end their servers
}
ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # listens on loopback alone, as on those systems
Bundle = Mapping[str, float]
_RAY = (sys.executable, "-P", "-c", "from ray.scripts.scripts import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """The controller's message to the nodes of a step, one line of JSON."""

    head: str | None  # the node that the cluster starts on; None: a node of another step
    host: str
    port: int
    token: str
    folder: str  # Ray's temporary files, private to this user; short, because it holds sockets
    resources: Mapping[str, Bundle]  # node -> its resources
    seconds: float  # limit of the wait for the head

    def line(self) -> bytes:
        """Returns the message as a line."""
        return json.dumps(asdict(self)).encode() + b"\n"


def environment(token: str) -> Mapping[str, str]:
    """Returns variables of every process of a cluster."""
    return {**SETTINGS, "RAY_AUTH_TOKEN": token}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The shares of roles in their nodes: a bundle per rank and per server, in order."""

    ranks: Mapping[str, Mapping[str, Sequence[Bundle]]]  # role -> node -> bundles; the learner's first
    engines: Mapping[str, Sequence[Bundle]]


def shares(placements: Sequence[RankPlacement], seats: Sequence[ServerPlacement], *, is_single: bool) -> Shares:
    """Returns the bundles of all ranks and servers. A resource of the role binds each bundle to its node.

    GPUs count for servers that are alone on their nodes; elsewhere servers and ranks share them.
    """
    ranks = {
        p.role: {node: [{"CPU": 1.0, resource(p.role, node): 1.0}] * p.ranks_per_node for node in p.nodes}
        for p in placements
    }
    engines: dict[str, list[Bundle]] = {}
    for seat in seats:
        gpus = {"GPU": float(len(seat.gpus))} if is_single and seat.gpus else {}
        engines.setdefault(seat.node, []).append({"CPU": 1.0, resource("engine", seat.node): 1.0, **gpus})
    return Shares(ranks=ranks, engines=engines)


def totals(*roles: Mapping[str, Sequence[Bundle]]) -> Mapping[str, Bundle]:
    """Returns the resources that each node needs for the bundles of roles."""
    out: dict[str, dict[str, float]] = {}
    for node, bundles in (item for role in roles for item in role.items()):
        has = out.setdefault(node, {})
        for name, amount in (item for bundle in bundles for item in bundle.items()):
            has[name] = has.get(name, 0.0) + amount
    return out


def resource(role: str, node: str) -> str:
    """Returns the name of the resource that binds a bundle of a role to its node."""
    return f"{role} on {node}"


def node_command(
    slurm: SlurmSection, placement: RankPlacement, folder: Path, *, python: str, where: Sequence[str] = ()
) -> list[str]:
    """Returns the srun command that starts Ray on every node of a role's ranks, with one log per node in ``folder``."""
    count, stem = len(placement.nodes), "ray" if placement.role == LEARNER else f"ray-{placement.role}"
    return [
        "srun",
        *where,
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--job-name={placement.role}",
        *cores_option(slurm.cores(placement.ranks_per_node)),
        "--kill-on-bad-exit=1",
        f"--output={folder}/{stem}-%t.txt",
        *_program(python),
    ]


def engine_node_command(allocation: Allocation, cpus: int | None, *, python: str) -> list[str]:
    """Returns the srun command that starts Ray on the nodes of engine servers alone, with ``cpus`` cores each
    (`cores_option`)."""
    output = f"--output={allocation.folder}/ray-engines-%t.txt"
    step = ("--ntasks-per-node=1", "--kill-on-bad-exit=1", output)
    return [*allocation.server_command(allocation.engine_nodes, cpus), *step, *_program(python)]


def _program(python: str) -> list[str]:
    return [python, "-P", "-m", "launcher.hosts.ray.node"]


def main() -> None:
    """Runs Ray on this node until the controller is gone; exits with Ray's status if Ray ends first.

    Raises PermissionError if its folder exists and belongs to another user.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # only ranks pass on Slurm's signals
    adopt_orphans()  # Ray's orphans become children of this process
    call = NodeCall(**json.loads(sys.stdin.readline()))
    private_folder(Path(call.folder))
    own = await_head(call) if this_node() != call.head else ""
    watch = ControllerWatch()
    ports = contextlib.nullcontext(0) if own else held_ports("")  # the head listens on loopback, too
    try:
        with lock_against_tmpfiles(Path(call.folder)), ports as port:
            command = [*_RAY, *options(call, this_node(), own, client_port=port)]
            status = run_ray(command, environment(call.token), call.seconds, watch)
    finally:
        shutil.rmtree(call.folder, ignore_errors=True)
    sys.exit(0 if watch.gone else status)


class ControllerWatch:
    """The controller's messages on the standard input: a line once the cluster has all its nodes, and the end."""

    def __init__(self) -> None:
        self.complete = self.gone = False
        self._ray: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def watch(self, ray: subprocess.Popen[bytes]) -> None:
        """Kills ``ray`` when the controller is gone; immediately if it already is."""
        with self._lock:
            self._ray = ray
            if self.gone:
                ray.kill()

    def _read(self) -> None:
        while os.read(0, 1):
            self.complete = True
        with self._lock:
            self.gone = True
            if self._ray is not None:
                self._ray.kill()


def run_ray(command: Sequence[str], variables: Mapping[str, str], seconds: float, watch: ControllerWatch) -> int:
    """Runs ``ray start --block`` to its end and returns its status. No process of it is left.

    If files are slow or a node is busy, Ray gives up on its own raylet after `RAYLET_SECONDS`, which no setting
    changes. So a Ray that ends after them is started again, for ``seconds`` in all and while the cluster lacks nodes.
    An earlier end has another cause.
    """
    end = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        ray = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env={**os.environ, **variables}, preexec_fn=die_with_parent
        )
        watch.watch(ray)
        status = ray.wait()
        _kill_children()
        now = time.monotonic()
        if watch.gone or watch.complete or now < begun + RAYLET_SECONDS or now > end:
            return status
        print(f"Ray ended with status {status} after {now - begun:.0f} s; it starts again", flush=True)


def _kill_children() -> None:
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)


def options(call: NodeCall, node: str, own: str, *, client_port: int) -> list[str]:
    """Returns options of ``ray start``, on the head or with the node's ``own`` address. Ray picks free ports, so that
    clusters do not collide, but for the head's own and ``client_port``: it ends if one of them is taken."""
    has = {name: int(amount) for name, amount in call.resources.get(node, {}).items()}
    common = [
        "start",
        "--block",
        f"--num-cpus={has.pop('CPU', 0)}",
        f"--num-gpus={has.pop('GPU', 0)}",
        f"--resources={json.dumps(has)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--include-log-monitor=false",
        "--disable-usage-stats",
    ]
    if own:
        return [*common, f"--address={call.host}:{call.port}", f"--node-ip-address={own}"]
    return [
        *common,
        "--head",
        f"--node-ip-address={call.host}",
        f"--port={call.port}",
        f"--ray-client-server-port={client_port}",
        "--include-dashboard=false",
        "--no-monitor",  # it would ask for more nodes
        f"--temp-dir={call.folder}",
    ]


def await_head(call: NodeCall) -> str:
    """Waits for the head; returns this node's address towards it. Raises TimeoutError if it does not answer in time."""
    end = time.monotonic() + call.seconds
    while True:
        try:
            with socket.create_connection((call.host, call.port), timeout=1.0) as stream:
                return str(stream.getsockname()[0])
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"Ray's head at {call.host}:{call.port} does not answer after {call.seconds:g} s: {error}"
                ) from error
            time.sleep(0.2)


def health_command(call: NodeCall) -> list[str]:
    """Returns a command that exits with status 0 once the head answers, and with another after half a minute."""
    return [*_RAY, "health-check", f"--address={call.host}:{call.port}"]


if __name__ == "__main__":
    main()
