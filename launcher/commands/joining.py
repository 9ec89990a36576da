"""``rl-megatron engines RUN join``: makes this node one of a running job's Ray cluster, while the command runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.control.address import address_of
from launcher.control.client import ask_run
from launcher.hosts.ray.node import COMPLETE
from launcher.hosts.slurm import jobs
from launcher.hosts.slurm.calls import outside_jobs
from launcher.processes.last_words import end_of
from launcher.processes.own_thread import OwnThread
from launcher.wire.greetings import this_node
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError

_LOOK_SECONDS = 0.2
_STOP_SECONDS = 60.0
_ASK_SECONDS = 60.0
"""Until the run has answered what it need not wait for, with what srun takes to reach it."""


def join_cluster_of(run: Path) -> None:
    """Run Ray on this node, with the run's token, until Ctrl-C or the run's end. Raises ConfigError."""
    node = this_node()
    told = _answer(run, "join", node=node, seconds=_ASK_SECONDS)
    limit = load_config(str(run / "config.yaml"), []).learner.timeout_seconds
    log = Path(told["log"])
    with log.open("ab") as output:
        ray = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.hosts.ray.node"],  # it ends Ray when its standard input closes
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=dict(os.environ),
        )
    assert ray.stdin is not None
    try:
        ray.stdin.write(told["line"].encode())
        ray.stdin.flush()
        asyncio.run(_await_joined(run, node, ray, log, seconds=limit + _ASK_SECONDS))
        with contextlib.suppress(BrokenPipeError):  # it has ended
            ray.stdin.write(COMPLETE)
            ray.stdin.flush()
        print(
            f"{node} has joined; `rl-megatron engines {shlex.quote(str(run))} add --node {node}` starts a server on "
            "it, Ctrl-C takes the node away again",
            flush=True,
        )
        status = ray.wait()
    except KeyboardInterrupt:
        print(f"{node} leaves", file=sys.stderr)
        return
    finally:
        ray.stdin.close()
        ray.wait(_STOP_SECONDS)
    print(f"Ray has ended here with status {status}, as with the run; {log} has its output", flush=True)


async def _await_joined(run: Path, node: str, ray: subprocess.Popen[bytes], log: Path, *, seconds: float) -> None:
    """Wait until the run's cluster has the node. Raises ConfigError as `_answer`, and at once where Ray ends here: it
    may have another version than the cluster."""
    asking = asyncio.ensure_future(OwnThread("joined")(_answer, run, "joined", node=node, seconds=seconds))
    while not (await asyncio.wait([asking], timeout=_LOOK_SECONDS))[0]:
        if (status := ray.poll()) is not None:
            asking.cancel()
            raise ConfigError(
                f"Ray ended here with status {status} before the run's cluster had {node}; {log} ends with:"
                f"{end_of(log)}"
            )
    await asking


def _answer(run: Path, command: str, *, node: str, seconds: float) -> Any:
    """The run's answer, by srun where its controller is on another node of its job. Raises ConfigError, also if it has
    not come after ``seconds``."""
    address = address_of(run)
    if address.here:
        return ask_run(run, command, seconds=seconds, node=node)
    client = [sys.executable, "-P", "-m", "launcher.control.client"]
    asking = [*client, str(run.resolve()), command, json.dumps({"node": node})]
    command_line = jobs.srun_beside(run, address) + asking
    try:
        done = subprocess.run(
            command_line, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=outside_jobs(), timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the run did not answer {command!r} within {seconds:g} s: srun could not start a step on {address.node}, "
            "where its controller is (squeue --steps shows it), or the controller is busy (log.txt)"
        ) from error
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"srun ended with status {done.returncode}")
    return json.loads(done.stdout)
