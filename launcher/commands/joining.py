"""``rl-megatron engines RUN join``: makes this node one of a running job's Ray cluster, while the command runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.control.address import address_of
from launcher.control.client import ask_run
from launcher.hosts.slurm import jobs
from launcher.wire.greetings import this_node
from rl_megatron.errors import ConfigError

_STOP_SECONDS = 60.0


def join_cluster_of(run: Path) -> None:
    """Run Ray on this node, with the run's token, until Ctrl-C or the run's end. Raises ConfigError."""
    node = this_node()
    told = _answer(run, "join", node=node)
    log = Path(told["log"])
    with log.open("ab") as output:
        ray = subprocess.Popen(
            [sys.executable, "-m", "launcher.hosts.ray.node"],  # it ends all of Ray when its standard input closes
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert ray.stdin is not None
    try:
        ray.stdin.write(told["line"].encode())
        ray.stdin.flush()
        _answer(run, "joined", node=node)
        print(
            f"{node} has joined; `rl-megatron engines {run} add --node {node}` starts a server on it, Ctrl-C takes the "
            "node away again",
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


def _answer(run: Path, command: str, *, node: str) -> Any:
    """The run's answer, by srun where its controller is on another node of its job. Raises ConfigError."""
    address = address_of(run)
    if address.here:
        return ask_run(run, command, node=node)
    asking = [sys.executable, "-m", "launcher.control.client", str(run.resolve()), command, json.dumps({"node": node})]
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    done = subprocess.run(
        jobs.srun_beside(run, address.node) + asking, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=own
    )
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"srun ended with status {done.returncode}")
    return json.loads(done.stdout)
