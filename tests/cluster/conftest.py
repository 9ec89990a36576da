"""A real Slurm of twenty-five nodes on this machine. All tests share it; jobs of several run at once."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import Cluster

NODES = 25
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "ip", "unshare") if shutil.which(name) is None]
FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """The cluster's folder; the first test process that needs the cluster starts it there."""
    given = _given(config)
    config.stash[FOLDER] = Path(given or tempfile.mkdtemp(prefix="rl_megatron-"))
    if given is None:  # tests that are ended by a time limit still stop the cluster
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", returncode=1))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a test process of pytest-xdist."""
    node.workerinput["cluster"] = str(node.config.stash[FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that chose the folder stops the cluster, even if another started it."""
    if _given(config) is None:
        _cluster(config).stop()
        shutil.rmtree(config.stash[FOLDER])


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Cluster:
    """Its nodes share a working folder with this machine."""
    if os.geteuid() or MISSING:
        pytest.skip(f"NO CLUSTER TESTS: they need root (uid {os.geteuid()} here) and {', '.join(MISSING) or 'no more'}")
    cluster = _cluster(pytestconfig)
    cluster.start(nodes=NODES)
    return cluster


def _given(config: pytest.Config) -> str | None:
    """The folder chosen by this process's parent, under pytest-xdist."""
    folder: str | None = getattr(config, "workerinput", {}).get("cluster")
    return folder


def _cluster(config: pytest.Config) -> Cluster:
    return Cluster(folder=config.stash[FOLDER] / "slurm", work=config.stash[FOLDER] / "work")
