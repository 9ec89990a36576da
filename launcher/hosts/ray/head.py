"""Makes this process the driver of a Ray cluster, which it starts here or whose head runs elsewhere.

Import it before ray, which reads its settings at import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from launcher.hosts.ray.node import (
    OBJECT_STORE_BYTES,
    ONE_MACHINE,
    SETTINGS,
    Bundle,
    NodeCall,
    environment,
    health_command,
)
from launcher.servers.site import HERE
from rl_megatron.errors import ConfigError

os.environ.update(SETTINGS)  # Ray reads them at import
if "SLURM_JOB_ID" not in os.environ:
    os.environ.update(ONE_MACHINE)

import ray
from ray.job_config import JobConfig

for _name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK"):  # of the cluster of a `ray job submit`
    os.environ.pop(_name, None)
logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it does not handle SIGTERM, which is intended

_LOOK_SECONDS = 0.2
_MISMATCH = "Version mismatch"  # how the RuntimeError of ray/_private/utils.py begins, in Ray 2.60


class _Job(JobConfig):
    """A job whose actors do not have the driver's folder before our packages: `run_worker` puts the user's behind."""

    @override
    def _runtime_env_has_working_dir(self) -> bool:
        return True  # for else Ray 2.60.0 puts the driver's script and current folder first (connect, worker.py)


@dataclass(slots=True, kw_only=True)
class Wait:
    """A wait for a cluster that goes on in several threads."""

    what: str  # is waited for now, for messages
    given_up: threading.Event = field(default_factory=threading.Event)


async def await_health(call: NodeCall) -> None:
    """Wait until the head answers, which may be some time after it listens.

    Ray itself would wait a quarter of an hour for a silent head, and block this process all the while.
    """
    while True:
        asking = await asyncio.create_subprocess_exec(
            *health_command(call),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **environment(call.token)},
        )
        try:
            if await asking.wait() == 0:
                return
        finally:
            if asking.returncode is None:
                asking.kill()
        await asyncio.sleep(_LOOK_SECONDS)


def join_cluster(call: NodeCall, wanted: set[str], wait: Wait) -> None:
    """Join a running cluster once it has the ``wanted`` resources, or end once nobody waits any more.

    Ray refuses by a RuntimeError, too, where the raylet of this node has not registered in a minute. Raises ConfigError
    where it has other versions.
    """
    os.environ.update({"RAY_gcs_server_port_wait_time_s": "1"})  # Ray makes one attempt with a limit, not twenty
    while not ray.is_initialized():
        try:
            with _holding(call.token):
                ray.init(
                    address=f"{call.host}:{call.port}",
                    job_config=_Job(),
                    log_to_driver=False,
                    configure_logging=False,
                )
        except (ConnectionError, RuntimeError) as error:
            if str(error).startswith(_MISMATCH):
                raise ConfigError(
                    f"Ray refuses the controller, as another try would not help: {' '.join(str(error).split())}; have "
                    f"all nodes run one environment ({sys.executable} here), which nobody changes while a job starts"
                ) from error
            wait.what = f"this node's raylet, of which Ray says: {error}"
            if wait.given_up.wait(_LOOK_SECONDS):
                raise
    while not wait.given_up.is_set():
        missing = sorted(wanted - ray.cluster_resources().keys())  # type: ignore[no-untyped-call]
        if not missing:
            return
        wait.what = f"nodes that have {', '.join(missing)}"
        wait.given_up.wait(_LOOK_SECONDS)


def start_here(has: Bundle, token: str, folder: str) -> None:
    """Start a cluster of this machine that ``has`` these resources, and be its driver."""
    own = {name: amount for name, amount in has.items() if name != "CPU"}
    with _holding(token):
        ray.init(
            address="local",
            job_config=_Job(),
            include_dashboard=False,
            num_cpus=int(has["CPU"]),
            num_gpus=0,
            resources=own,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=HERE,
            _temp_dir=folder,
        )


def take_sigterm_back() -> None:
    """Have this process's own handler of SIGTERM run again, which a driver's start replaces. The main thread calls it.

    Ray's (absl's failure_signal_handler.cc, installed for SIGTERM as for SIGSEGV) prints a stack, calls the one before,
    and has SIGALRM abort the process three seconds later.
    """
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)  # as asyncio sets it


def said(error: BaseException) -> str:
    """Ray's account of an end, as the end of a sentence."""
    lines = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
    return f"\nRay: {lines}"


@contextlib.contextmanager
def _holding(token: str) -> Iterator[None]:
    """Give Ray, and the processes that it starts within, the cluster's token; later processes do not get it."""
    os.environ.update(environment(token))
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
