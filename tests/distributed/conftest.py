"""Ranks that a local run forks from a process with their imports, for tests of what ranks do, not of their start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import pytest

from launcher.processes.environment import variables
from launcher.wire import Muster
from tests.forks import FORKS, be_node


@pytest.fixture
def forked_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of a `LocalLauncher` that forks ranks is a fork: in an interpreter of its own it would import torch and
    megatron."""
    monkeypatch.setattr("launcher.hosts.local.start_node", ForkedNode)


class ForkedNode:
    """As what ``local.start_node`` returns. The run's threads are in this process, not in its parent."""

    def __init__(self, muster: Muster) -> None:
        environment = {**os.environ, **variables(threads=muster.call.threads, device=muster.call.device)}
        stderr = [Connection(os.dup(descriptor)) for descriptor in muster.stderr]
        self._process = FORKS.Process(target=_main, args=(muster, stderr, environment))
        self._process.start()
        for each in stderr:
            each.close()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _main(muster: Muster, stderr: Sequence[Connection], environment: Mapping[str, str]) -> None:
    be_node(muster, [os.dup(each.fileno()) for each in stderr], environment)
