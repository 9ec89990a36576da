"""Ranks that a local run forks from a process with their imports, for tests of what ranks do, not of their start."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import pytest

from tests.forks import FORKS, be_nursery


@pytest.fixture
def forked_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nursery of a `LocalLauncher` is a fork: in an interpreter of its own it would import torch and megatron."""
    monkeypatch.setattr("launcher.hosts.forks.nursery_process", ForkedNursery)


class ForkedNursery:
    """As what ``forks.nursery_process`` returns. The run's threads are in this process, not in its parent."""

    def __init__(self, imports: Sequence[str], stdin: int) -> None:
        with socket.socket(fileno=os.dup(stdin)) as controller:
            self._process = FORKS.Process(target=_main, args=(controller, tuple(imports), dict(os.environ)))
            self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _main(controller: socket.socket, imports: Sequence[str], environment: Mapping[str, str]) -> None:
    be_nursery(controller.detach(), imports, environment)
