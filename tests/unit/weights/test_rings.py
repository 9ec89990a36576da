"""Rings between processes of which one dies between the rendezvous and its connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from rl_megatron.errors import SyncError
from rl_megatron.weights.transports.shared_memory import _HELLO, Rings
from rl_megatron.weights.transports.words import Peers


class Dying(Peers):
    """This process, rank 0, and others: after the rendezvous they listen no more, and ``last`` is all that they do."""

    rank, size = 0, 4

    def __init__(self, last: Callable[[bytes], None] = lambda address: None) -> None:
        self._last = last

    @override
    def gather(self, mine: Any) -> list[Any]:
        boot, address = mine
        self._last(bytes.fromhex(address))
        return [mine, *([boot, (b"\0" + os.urandom(16)).hex()] for _ in range(1, self.size))]


def made(slots: dict[tuple[int, int], int], peers: Peers) -> Rings:
    ends: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    return Rings(ends, slots, lambda peer, slots, leaving: [], peers=peers, timeout_seconds=0.05)


def cut_off(address: bytes) -> None:
    """Connect, and end before the first word."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)


def cut_off_later(address: bytes) -> None:
    """Connect, announce more than is sent, and end."""
    with socket.socket(socket.AF_UNIX) as connection, Path("/dev/null").open() as file:
        connection.connect(address)
        socket.send_fds(connection, [_HELLO.pack(2, 4096, 9), b"four"], [file.fileno()])


@pytest.mark.parametrize(
    ("slots", "last", "said"),
    [
        ({(0, 2): 8, (3, 0): 8}, None, "rank 0 waited for rank 2 to take .*refused"),
        ({(2, 0): 8, (3, 0): 8}, None, "rank 0 waited for rank 2 or 3 to offer .*timed out"),
        ({(2, 0): 8}, cut_off, "rank 0 waited for rank 2 to offer .*its connection is closed"),
        ({(2, 0): 8}, cut_off_later, "rank 0 waited for rank 2 to offer .*its connection is closed"),
    ],
)
def test_a_process_that_dies_before_it_is_connected_is_named(
    slots: dict[tuple[int, int], int], last: Callable[[bytes], None] | None, said: str
) -> None:
    with pytest.raises(SyncError, match=said):
        made(slots, Dying() if last is None else Dying(last))
