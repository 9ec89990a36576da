"""A node of the user's own that joins a job's Ray cluster: what it gets, and why another is refused."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.commands import joining
from launcher.hosts.more_sites import MoreOnNodes
from launcher.hosts.ray.guests import Guests
from launcher.hosts.ray.node import NodeCall, options
from launcher.hosts.slurm.allocation import Allocation
from launcher.processes.guards import Guard, Order
from launcher.servers.site import Site, Sites
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError, EngineError

HEAD = NodeCall(
    head="node1", host="10.0.0.1", port=6379, token="secret", folder="/tmp/rlm-7-x", resources={}, seconds=600.0
)


class Nodes:
    """The nodes of a cluster, one more each time that it is asked."""

    def __init__(self, allocation: Allocation | None, later: Collection[str] = ()) -> None:
        self.allocation, self.call, self._there, self._later = allocation, HEAD, ["node1", "node2"], list(later)

    async def nodes(self) -> Collection[str]:
        self._there += self._later[:1]
        del self._later[:1]
        return list(self._there)


def job(folder: Path, *engine_nodes: str) -> Allocation:
    return Allocation(
        id="7", restart=0, here="node1", nodes=("node1",), engine_nodes=engine_nodes, heterogeneous=False, folder=folder
    )


def test_a_node_gets_what_those_of_the_job_had_but_with_a_place_for_servers_alone(tmp_path: Path) -> None:
    guests = Guests(Nodes(job(tmp_path, "node2")), load_config("tiny_cpu", ["rollout=vllm"]))
    told = asyncio.run(guests.invited({"node": "node9"}))
    assert Path(told["log"]) == tmp_path / "ray-joined-node9.txt"
    call = NodeCall(**json.loads(told["line"]))
    assert (call.head, call.token, call.folder) == (None, "secret", "/tmp/rlm-7-x")
    given = options(call, "node9", "10.0.0.9", client_port=0)
    wanted = ["--address=10.0.0.1:6379", "--node-ip-address=10.0.0.9", "--num-cpus=0", "--num-gpus=0"]
    assert {*wanted, '--resources={"engine on node9": 1}'} <= set(given)


@pytest.mark.parametrize(
    ("engine_nodes", "keys", "node", "why"),
    [
        (None, (), "node9", "on one machine and listens on loopback alone.*engines RUN add"),
        (
            (),
            (),
            "node9",
            "slurm.engines.nodes=0: .*in the memory of the learner's nodes.*submit it with nodes for servers",
        ),
        (
            ("node2",),
            ("learner.device=cuda",),
            "node9",
            "cuda: on GPUs servers are on the nodes that the job started",
        ),
        (("node2",), (), "node2", "node2 is in this run's cluster; .*add --node node2"),
    ],
)
def test_a_node_that_servers_could_not_be_on_is_refused(
    tmp_path: Path, engine_nodes: tuple[str, ...] | None, keys: tuple[str, ...], node: str, why: str
) -> None:
    allocation = None if engine_nodes is None else job(tmp_path, *engine_nodes)
    guests = Guests(Nodes(allocation), load_config("tiny_cpu", ["rollout=vllm", *keys]))
    with pytest.raises(ConfigError, match=why):
        asyncio.run(guests.invited({"node": node}))


class Alive:
    """A cluster with the nodes of a job, and node9, which has joined it."""

    def __init__(self, allocation: Allocation, address: str = "10.0.0.9") -> None:
        self.allocation, self.address = allocation, address

    async def nodes(self) -> Mapping[str, Any]:
        return {name: SimpleNamespace(address=self.address) for name in ("node1", "node2", "node9")}

    async def start_on(self, node: str, order: Order) -> Guard:
        raise NotImplementedError


def test_a_node_that_joined_takes_any_number_of_servers_and_the_place_of_one_that_left_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from launcher.hosts.ray.more import MoreOnRay

    def more(living: Sequence[Sites], vacant: Sequence[Sites], node: str = "node9", **given: str) -> Sites:
        cluster: Any = Alive(allocation, **given)
        return asyncio.run(MoreOnRay(cluster=cluster, known=known)(node, living, vacant))

    allocation = job(tmp_path, "node2")
    monkeypatch.setattr(Allocation, "nodes_left", lambda self: {"node1", "node2"})
    known = MoreOnNodes(
        config=load_config("tiny_cpu", ["rollout=vllm", "slurm.engines.nodes=1"]), allocation=allocation
    )
    first: Sites = [Site(node="node2", host="10.0.0.9")]
    second = more([first], [])
    third = more([first, second], [])
    assert [(site.node, site.host, site.number) for site in (*second, *third)] == [
        ("node9", "10.0.0.9", 1),
        ("node9", "10.0.0.9", 2),
    ]
    assert more([first, second], [third]) is third  # dropped, or not started
    assert more([second, third], [first], "node2") is first
    assert more([first], [second], address="10.0.0.8")[0].host == "10.0.0.8"  # it came back as another
    with pytest.raises(ConfigError, match="--node node1: servers of this run can be on node2"):
        more([first], [], "node1")


def test_a_node_is_waited_for_with_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.hosts.ray.guests._LOOK_SECONDS", 0.0)
    config = load_config("tiny_cpu", ["rollout=vllm", "learner.timeout_seconds=0.05"])
    asyncio.run(Guests(Nodes(job(tmp_path, "node2"), ["node8", "node9"]), config).joined({"node": "node9"}))
    with pytest.raises(EngineError, match=r"Ray has no node node9 after learner\.timeout_seconds=0\.05"):
        asyncio.run(Guests(Nodes(job(tmp_path, "node2")), config).joined({"node": "node9"}))


def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch, srun: str) -> Path:
    """A run whose controller is on another node, which this srun reaches."""
    run, command = folder / "run", folder / "bin" / "srun"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    (run / "control.json").write_text('{"node": "node1", "path": "/tmp/nowhere", "job": "7"}')
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{srun}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return run


def test_a_step_that_slurm_does_not_start_is_waited_for_no_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = elsewhere(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(joining, "_ASK_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"did not answer 'join' within 0.2 s: srun could not start .* on node1"):
        joining.join_cluster_of(run)


def test_a_node_whose_ray_ends_waits_for_the_run_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another version than the cluster's."""
    line = replace(HEAD, host="127.0.0.1", port=1, folder=str(tmp_path / "ray"), seconds=0.0).line().decode()
    (tmp_path / "told").write_text(json.dumps({"line": line, "log": str(tmp_path / "log")}))
    srun = f"""case "$*" in
*" joined "*) until [ -e {tmp_path}/over ]; do sleep 0.05; done; exit 1 ;;
*) cat {tmp_path}/told ;;
esac"""
    run = elsewhere(tmp_path, monkeypatch, srun)
    said = (
        r"Ray ended here with status 1 before the run's cluster had .*(?s:.*)Ray's head at 127.0.0.1:1 does not answer"
    )
    try:
        with pytest.raises(ConfigError, match=said):
            joining.join_cluster_of(run)
    finally:
        (tmp_path / "over").touch()
