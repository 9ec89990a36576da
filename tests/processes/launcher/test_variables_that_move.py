"""Processes start while another thread of the controller sets environment variables, as imports of libraries do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from launcher.processes.scratch import removed


@pytest.fixture
def moving() -> Iterator[None]:
    """A thread that adds variables all the time, so that the C library moves them. Without ``env`` one start in three
    failed with EFAULT ("Bad address")."""
    ended, names = threading.Event(), [f"RL_MEGATRON_TEST_{n}" for n in range(3000)]

    def add() -> None:
        while not ended.is_set():
            for name in names:
                os.environ[name] = "x" * 50
            for name in names:
                del os.environ[name]

    thread = threading.Thread(target=add)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("moving")
def test_a_process_starts_while_variables_move() -> None:
    for _ in range(30):
        with removed():
            pass
