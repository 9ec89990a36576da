"""Ports that are held until a server binds them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from launcher.processes import ports
from launcher.processes.ports import any_port, free_port, held_ports

HERE = "127.0.0.1"


async def test_a_held_port_goes_to_the_server_alone() -> None:
    with held_ports(HERE) as port:
        for number in (port, port + 1):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((HERE, number))
        for number in (port, port + 1):
            server = await asyncio.start_server(lambda reader, writer: writer.close(), HERE, number)
            async with server:
                with pytest.raises(OSError, match="in use"):
                    await asyncio.start_server(lambda reader, writer: writer.close(), HERE, number)
                reader, writer = await asyncio.open_connection(HERE, number)
                assert await reader.read() == b""
                writer.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was closed a moment ago waits a minute
        other.bind((HERE, port))


def test_no_two_hold_one_port_and_the_system_gives_none_of_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_HIGH", ports._LOW + 8 * ports.BLOCK)
    with contextlib.ExitStack() as stack:
        held = {stack.enter_context(held_ports(HERE)) for _ in range(4)}
        assert len(held) == 4
        assert free_port(HERE) not in held
    with held_ports(HERE) as port:
        monkeypatch.setattr(ports, "_LOW", port)
        monkeypatch.setattr(ports, "_HIGH", port + ports.BLOCK)
        for address in (HERE, ""):
            with pytest.raises(OSError, match="in use"):
                free_port(address)


def test_servers_of_one_run_never_meet_on_another_node() -> None:
    drawn = [{any_port(number, 300) for _ in range(40)} for number in range(300)]
    assert sum(map(len, drawn)) == len(set().union(*drawn))
    assert all(len(each) > 1 for each in drawn)  # one that is taken there is not drawn for ever


def test_ports_lie_below_those_that_the_system_hands_out() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 <= any_port(number % 7, 7) <= lowest - ports.BLOCK for number in range(1000))
