"""Servers join and leave a run by ``rl-megatron engines``, one is killed, one loses its node; each prompt is trained on
once. 30 seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from launcher.control.client import ask_run
from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import read_jsonl
from tests.e2e.processes import Place, Run, alive, eventually
from tests.exposure import check_control, check_secrets, check_sockets, family
from tests.unit.launcher.commands import Said

KEYS = (
    *("learner.ep=1", "reward.function=my_rewards:even", "rollout.server.replicas=2", "train.max_staleness=2"),
    *("warm_start.steps=0", "train.steps=100000", "eval.every=0", "checkpoint.every=0", "rollout.max_new_tokens=48"),
    "rollout.server.backoff_seconds=0.01",
)
LATER = """
import sys, time
from ray._private.node import Node
from ray._private.parameter import RayParams

address = {"gcs_address": sys.argv[1], "node_ip_address": "127.0.0.1", "node_name": "later"}
size = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}
params = RayParams(**address, **size, min_worker_port=0, max_worker_port=0, include_log_monitor=False)
node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)  # `ray start` takes no node on loopback
print("up", flush=True)
time.sleep(1e6)
"""


@contextlib.contextmanager
def held(place: Place) -> Iterator[None]:
    """Rewards wait, and so do steps, which would take the CPU that servers and nodes start by."""
    hold = place.folder / "hold"
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


def engines(run: Run, action: str = "list", **arguments: object) -> list[tuple[int, str]]:
    rows: list[dict[str, Any]] = ask_run(run.folder, "engines", action=action, **arguments)
    return [(row["number"], row["state"]) for row in rows]


def servers(parent: int) -> dict[int, psutil.Process]:
    """The servers' processes below ``parent``, by their numbers, which are those of the logs that they write."""
    found = {}
    for process in family(parent):
        try:
            line, output = process.cmdline(), os.readlink(f"/proc/{process.pid}/fd/1")
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue  # it ended just now
        if line[1:4] == ["-P", "-m", "rl_megatron.rollout.servers.embedded.server"]:
            log = re.search(r"/local_(\d+)\.log$", output)
            assert log is not None
            found[int(log[1])] = process
    return found


def steps(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows() if row["phase"] == "rl" and row["step"]]


def serving_after_two_more(run: Run) -> object:
    """How many serve, once two more steps are made: the first may have been under way."""
    before = len(steps(run))
    run.until(lambda: len(steps(run)) >= before + 2, "two more steps")
    return steps(run)[-1]["engine/healthy"]


def each_prompt_is_trained_on_once(run: Run) -> None:
    """In steps without a gap, and by no older version than allowed."""
    made = steps(run)
    assert [row["step"] for row in made] == list(range(1, len(made) + 1))
    assert max(row["staleness/max"] for row in made) <= 2
    lines = list(read_jsonl(run.folder / "ledger.jsonl"))
    ordinals = sorted(int(str(line["ordinal"])) for line in lines)
    assert Counter(line["state"] for line in lines) == {"trained": 4 * len(made)}
    assert len(set(ordinals)) == len(ordinals)  # and none is missing: what is not trained on was drawn last
    assert set(range(ordinals[-1] + 1)) - set(ordinals) <= set(range(ordinals[-1] - 2 * 4, ordinals[-1]))
    for line in lines:
        versions = [int(version) for version in re.findall(r":(\d+)", str(line["spans"]))]
        assert int(str(line["step"])) - 1 - min(versions) <= 2
        assert max(versions) < int(str(line["step"]))


def test_servers_come_and_go_and_no_prompt_is_lost_or_trained_on_twice(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place.start("elastic", *KEYS)  # no fork: who listens is known by command lines
    run.until_row(phase="rl", step=1)
    everything = family(run.process.pid)
    socket = check_control(run.folder, everything)
    assert set(check_sockets(everything)) == {"An engine server", "A learner rank"}
    check_secrets(everything, run.folder, socket.parent)
    first = servers(run.process.pid)
    assert engines(run) == [(0, "healthy"), (1, "healthy")]
    assert engines(run, "drop", number=0) == [(1, "healthy")]
    assert not alive(first[0])
    assert serving_after_two_more(run) == 1
    with pytest.raises(ConfigError, match="server 1 stays: without it 0 would serve"):
        engines(run, "drop", number=1)
    with held(place):
        assert engines(run, "add", count=1, node=None) == [(1, "healthy"), (2, "healthy")]
    assert set(servers(run.process.pid)) == {1, 2}
    assert serving_after_two_more(run) == 2
    first[1].kill()
    with held(place):
        eventually(lambda: servers(run.process.pid).get(1) not in (None, first[1]), "its next process", every=0.1)
        eventually(lambda: engines(run) == [(1, "healthy"), (2, "healthy")], "its return", every=0.1)
    run.until(lambda: steps(run)[-1]["engine/restarts"] == 1 and steps(run)[-1]["engine/healthy"] == 2, "both in a row")
    assert engines(run, "drop", number=1, drain=True) == [(2, "healthy")]
    told = Said("engines", capsys)(str(run.folder)).splitlines()
    assert told[0].split() == ["server", "state", "node", "version", "completions", "restarts"]
    assert [line.split()[:2] for line in told[1:]] == [["2", "healthy"]]
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    assert not socket.parent.exists()
    assert "no process of this run listens" in Said("engines", capsys)(str(run.folder), status=1)
    each_prompt_is_trained_on_once(run)


def test_a_server_joins_on_a_node_that_joined_ray_and_is_lost_with_it(place: Place) -> None:
    pytest.importorskip("ray")
    run = place.fork("on-ray", *KEYS, "rollout.server.replicas=1", "rollout.server.restarts=1", "run.launcher=ray")
    run.until_row(phase="rl", step=1)
    (first,) = [process for process in family(run.process.pid) if process.name() == "raylet"]
    address = next(word for word in first.cmdline() if word.startswith("--gcs-address=")).partition("=")[2]
    output = place.folder / "later.txt"
    with (
        output.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-c", LATER, address], stdout=file, stderr=file, env=first.environ()
        ) as later,
    ):
        try:
            with pytest.raises(ConfigError, match="--node nowhere: this run is on one machine"):
                engines(run, "add", node="nowhere")
            with held(place):
                run.until(lambda: later.poll() is not None or output.read_text() == "up\n", "the node")
                assert engines(run, "add", node="later") == [(0, "healthy"), (1, "healthy")]
            assert serving_after_two_more(run) == 2
            assert set(servers(later.pid)) == {1}
        finally:
            for process in (*psutil.Process(later.pid).children(recursive=True), psutil.Process(later.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()  # as where a node loses power
    said = "replica 1 is given up; the run goes on with 0"
    with held(place):
        run.until(lambda: said in (run.folder / "log.txt").read_text(), "its end")
    assert serving_after_two_more(run) == 1
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    each_prompt_is_trained_on_once(run)
