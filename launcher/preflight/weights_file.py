"""Checks of the file of weights that servers read: its folder, its size in a node's memory, and who sees it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

from launcher.preflight.subject import Found, problem
from launcher.servers.degrees import served_bytes
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.errors import ConfigError, gigabytes
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.files import hosts_of, weights_folder


def fitting_problems(config: RunConfig, needed: int, when: str = "") -> Iterator[Found]:
    """Yields a problem if the file of weights, of ``needed`` bytes in a node's memory, can never fit there."""
    has = shutil.disk_usage(NODE_MEMORY).total
    if 0 < has < needed:  # 0: without a limit
        size, room = gigabytes(needed, has)
        yield problem(
            f"weights.folder={weights_folder(config)} needs {size}{when} for the file of weights, but "
            f"{NODE_MEMORY} has {room} here; give the container more (docker run --shm-size="
            f"{math.ceil(needed / 2**30)}g; in Kubernetes a volume of memory at {NODE_MEMORY}), or set weights.folder "
            "to a folder on disk that all nodes see"
        )


def usable_problems(config: RunConfig, *, here: bool) -> Iterator[Found]:
    """Yields a problem if the file of weights cannot be made in ``weights.folder``; ``here``: on this machine."""
    folder = config.weights.folder if config.rollout.served else None
    if folder is None:
        return
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir() or (here and not os.access(nearest, os.W_OK | os.X_OK)):
        what = "it cannot be written to" if nearest.is_dir() else "it is not a folder"
        yield problem(f"weights.folder={folder}: the file of weights cannot be made in {nearest}: {what}; give another")


def seen_problems(config: RunConfig) -> Iterator[Found]:
    """Yields a problem if servers by address on another machine are to read a file in this one's memory."""
    folder, addresses = weights_folder(config), config.rollout.server.addresses
    if not config.rollout.served or addresses is None or folder is None or not folder.is_relative_to(NODE_MEMORY):
        return
    if away := [host for host in hosts_of(addresses) if _is_elsewhere(host)]:
        yield problem(
            f"weights.folder={folder} is in a node's own memory, which the servers of rollout.server.addresses at "
            f"{', '.join(dict.fromkeys(away))} do not see; give a folder that all see, or leave it out; a server on "
            f"this machine may be given as 127.0.0.1, or {socket.gethostname()}"
        )


def _is_elsewhere(host: str) -> bool:
    """Whether it has addresses, and all are another machine's. None within a second: False, as nothing is known."""
    found: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(str(address[0]) for *_, address in socket.getaddrinfo(host, None))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(1.0)
    own = {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}
    return bool(found) and not any(_is_own(ip_address(one.partition("%")[0]), own) for one in found)


def _is_own(address: IPv4Address | IPv6Address, own: set[str]) -> bool:
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified or str(address) in own


def raise_unread_files(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError if servers without a learner cannot read the file of a model of ``shape``, or if it can never
    fit in this machine's memory, where it is there."""
    folder = weights_folder(config) if config.rollout.served else None
    needed = served_bytes(config, shape) if folder is not None and folder.is_relative_to(NODE_MEMORY) else 0
    found = *usable_problems(config, here=True), *seen_problems(config), *fitting_problems(config, needed)
    if found:
        raise ConfigError("\n".join(one.text for one in found))
