"""A real Slurm of two nodes on this machine, and the run that all jobs are compared with."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import REWARDS, Cluster, Record

MISSING = [name for name in ("slurmctld", "slurmd", "munged", "ip", "unshare") if shutil.which(name) is None]


@pytest.fixture(scope="session", autouse=True)
def _no_daemon_stays() -> None:
    """Tests that are ended by a time limit still stop the cluster."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", returncode=1))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that share a working folder with this machine."""
    if os.geteuid() or MISSING:
        pytest.skip(f"NO CLUSTER TESTS: they need root (uid {os.geteuid()} here) and {', '.join(MISSING) or 'no more'}")
    work = tmp_path_factory.mktemp("work")
    (work / "my_rewards.py").write_text(REWARDS)
    cluster = Cluster(folder=tmp_path_factory.mktemp("slurm"), work=work)
    try:
        cluster.start(nodes=2)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def local(cluster: Cluster) -> Record:
    """What the run gives on this machine, without Slurm."""
    return cluster.train_here("local")
