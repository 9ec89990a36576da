"""What the bytes of a push cross, and where servers find files of weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.placement.files import weights_folder, writers_of_files
from rl_megatron.scaling.routes import route_of
from tests.unit.scaling.test_pushes import tiny


@pytest.mark.parametrize(
    ("keys", "route"),
    [
        (("rollout=vllm",), "a file in /dev/shm, on one node"),
        (("rollout=vllm", "weights.folder=/fast"), "a node's loopback and then through a file in /fast, on one node"),
        (
            ("rollout=vllm", "rollout.server.addresses=http://localhost:1,http://127.0.0.1:2"),
            "a file in /dev/shm, on one node",
        ),
        (
            ("rollout=vllm", "slurm.nodes=2"),  # the server is on the first
            "a node's loopback and the network and then through a file in /dev/shm, on one node",
        ),
        (
            ("rollout=vllm", "slurm.nodes=2", "rollout.server.replicas=2", "weights.folder=/dev/shm/x"),
            "a node's loopback and the network and then through a file in /dev/shm/x on each of 2 nodes",
        ),
        (("rollout=vllm", "weights.transport=direct", "run.launcher=local"), "a node's loopback"),
        (("rollout=vllm", "weights.transport=direct", "slurm.engines.nodes=1"), "the network"),
        (
            ("rollout=vllm", "weights.transport=direct", "slurm.nodes=2", "rollout.server.replicas=2"),
            "a node's loopback and the network, to the learner rank beside each of the servers' ranks",
        ),
        (("slurm.nodes=2",), "a node's loopback and the network"),
        (("learner.device=cuda", "slurm.gpus_per_node=2", "weights.transport=direct"), "NVLink"),
    ],
)
def test_the_route_says_what_bytes_cross(keys: Sequence[str], route: str) -> None:
    found = route_of(tiny(*keys))
    assert found.describe() == route
    assert not found.shared


@pytest.mark.parametrize(
    ("addresses", "folder"),
    [
        ("http://10.0.0.7:8000", None),
        ("http://localhost:1,http://node7:8000", None),
        ("http://[::1]:1,http://127.0.0.1:2", NODE_MEMORY),
    ],
)
def test_servers_by_address_elsewhere_find_their_weights_in_the_runs_folder(
    addresses: str, folder: Path | None
) -> None:
    """They do not see this machine's /dev/shm."""
    config = tiny("rollout=sglang", f"rollout.server.addresses={addresses}")
    assert weights_folder(config) == folder
    assert writers_of_files(config) == [range(2 if folder else 1)]


def test_a_run_on_this_machine_has_its_file_here() -> None:
    assert not route_of(load_config("tiny_cpu", ["rollout=vllm", "weights.transport=file"])).shared
    assert not route_of(tiny("rollout=vllm", "weights.folder=/dev/shm/x")).shared
