"""Processes of other users, and processes that end, while ranks connect their rings."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.errors import SyncError
from rl_megatron.weights.transports.shared_memory import _HELLO, Rings

_STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
streams = []
for name in sys.argv[2:]:
    for _ in range(int(sys.argv[1])):
        streams.append(socket.socket(socket.AF_UNIX))
        streams[-1].setblocking(False)
        try:
            streams[-1].connect(bytes.fromhex(name))
        except BlockingIOError:  # the queue is full
            break
print(len(streams))
"""


def connected(rank: int, peers: Any) -> list[tuple[int, bool]]:
    """The links of a rank that sends to the other and receives from it."""
    ends: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    rings = Rings(ends, {(0, 1): 4096, (1, 0): 4096}, lambda *_: [], peers=peers, timeout_seconds=60)
    try:
        return [(link.peer, link.leaving) for link in rings.links]
    finally:
        rings.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("each", [1, 1000])
def test_another_users_connections_are_turned_away(each: int) -> None:
    """One before each rank's, and as many as fill the ranks' queues."""
    places: dict[int, list[str]] = {}
    seen: list[int] = []

    def strangers_come() -> None:
        command = [sys.executable, "-I", "-S", "-c", _STRANGER, str(each), *(name for _, name in places.values())]
        seen.append(int(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout))

    everybody = threading.Barrier(2, strangers_come, timeout=60)

    def run(rank: int) -> list[tuple[int, bool]]:
        def gather(mine: list[str]) -> list[list[str]]:
            places[rank] = mine
            everybody.wait()
            return [places[0], places[1]]

        return connected(rank, SimpleNamespace(size=2, gather=gather))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[(1, True), (1, False)], [(0, True), (0, False)]]
    assert seen == [2] if each == 1 else 4 < seen[0] < 20


@pytest.mark.parametrize("said", [b"", _HELLO.pack(1, 4096, 10) + b"123"], ids=["nothing", "a part"])
def test_a_rank_that_ends_as_it_connects_is_an_error(said: bytes) -> None:
    there = socket.socket(socket.AF_UNIX)

    def gather(mine: list[str]) -> list[list[str]]:
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(bytes.fromhex(mine[1]))
            sender.sendall(said)
        there.bind(f"\0{mine[1]}")
        there.listen()
        return [mine, [mine[0], there.getsockname().hex()]]

    with there, pytest.raises(SyncError, match=r"rank 0 waited for rank 1 to offer .*its connection is closed"):
        connected(0, SimpleNamespace(size=2, gather=gather))
