"""Compares the memory that the fullest GPU, and the fullest node, need with the memory that they have, and the file of
weights with /dev/shm."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import accumulate

import psutil

from launcher.preflight.devices import count_visible_gpus
from launcher.preflight.subject import Found, Subject, found_by, problem, unchecked
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.files import hosts_of, weights_folder
from rl_megatron.placement.ranks import ranks_by_role
from tools.planner.hardware import GB, gigabytes
from tools.planner.host_memory import (
    copies_bytes,
    file_bytes,
    filled_bytes,
    host_bytes,
    sent_straight,
    why_off_gpus,
)
from tools.planner.memory import check_memory
from tools.planner.pushes import served_bytes

_UNITS: Mapping[str, int] = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}  # of Slurm's --mem


def check(subject: Subject) -> Iterator[Found]:
    """Compares the learner's memory with ``slurm.gpu_memory_gb``, what a run keeps in a node's memory with that, and
    the file of weights with the file system that it is in, if that is this machine's, and who reads it."""
    config = subject.config
    yield from _usable(config, here=not subject.for_job)
    if _is_here(subject):
        when = " at the run's end, and when a server is restarted" if sent_straight(config) else ""
        yield from found_by("memory", _fits(config, filled_bytes(config, subject.shape), when))
        yield from _seen(config)
    if config.learner.device != "cpu":
        yield from found_by("memory", _on_gpus(subject))
        yield from _on_nodes(subject)


def _on_gpus(subject: Subject) -> Iterator[Found]:
    """Raises ConfigError if it does not fit."""
    if check_memory(subject.config, subject.shape, _gpus_here(subject)) is None:
        yield unchecked("the memory of the GPUs, because slurm.gpu_memory_gb is not set")


def _on_nodes(subject: Subject) -> Iterator[Found]:
    parts = [part for part in _parts(subject) if part.size]
    if not parts:
        return
    (has, said), needed = _node(subject), sum(part.size for part in parts)
    if has is None:
        keys = " and ".join(part.keys for part in parts)
        yield unchecked(f"that a node has {needed / GB:.0f} GB of memory for {keys}")
        return
    sums = accumulate(part.size for part in parts)
    if (last := next((number for number, held in enumerate(sums) if held > has), None)) is not None:
        *before, part = parts[: last + 1]
        besides = " and ".join(f"{gigabytes(other.size)[0]} for {other.keys}" for other in before)
        size, room = gigabytes(part.size, has)
        yield problem(
            f"{part.given} needs {size} of a node's memory for {part.what}"
            f"{besides and f' besides {besides}'}, but {said} {room}; take nodes with more memory, or "
            f"{part.remedy}"
        )


def _fits(config: RunConfig, needed: int, when: str = "") -> Iterator[Found]:
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


def _usable(config: RunConfig, *, here: bool) -> Iterator[Found]:
    """Yields a problem if the file of weights cannot be made in ``weights.folder``; ``here``: on this machine."""
    folder = config.weights.folder if config.rollout.served else None
    if folder is None:
        return
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir() or (here and not os.access(nearest, os.W_OK | os.X_OK)):
        what = "it cannot be written to" if nearest.is_dir() else "it is not a folder"
        yield problem(f"weights.folder={folder}: the file of weights cannot be made in {nearest}: {what}; give another")


def _seen(config: RunConfig) -> Iterator[Found]:
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
    if problems := [found.text for found in (*_usable(config, here=True), *_seen(config), *_fits(config, needed))]:
        raise ConfigError("\n".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What needs ``size`` bytes of a node's memory: its ``keys``, as they are ``given``, ``what`` it is for."""

    size: float
    keys: str
    given: str
    what: str
    remedy: str


def _parts(subject: Subject) -> Iterator[_Part]:
    """In the order in which they must have room."""
    config, shape, folder = subject.config, subject.shape, weights_folder(subject.config)
    more_nodes = "more nodes (slurm.nodes with learner.dp or learner.ep), or"
    yield _Part(
        size=host_bytes(config, shape),
        keys=" and ".join(why_off_gpus(config)),
        given=_given(config),
        what="what the learner keeps off its GPUs",
        remedy=f"{more_nodes} keep less there",
    )
    yield _Part(
        size=file_bytes(config, shape),
        keys=f"weights.folder={folder}",
        given=f"weights.folder={folder}",
        what="the file of weights",
        remedy="set weights.folder to a folder on disk that all nodes see",
    )
    yield _Part(
        size=copies_bytes(config, shape),
        keys="checkpoint.async_save",
        given="checkpoint.async_save=true",
        what="copies of what is saved",
        remedy=f"{more_nodes} set checkpoint.async_save=false: training then waits for each checkpoint",
    )


def _gpus_here(subject: Subject) -> int | None:
    """GPUs of this machine, if the run is on it alone and they are known and enough for the ranks; else None."""
    if subject.for_job or subject.config.run.launcher != "local":
        return None
    count = count_visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 0
    return count if count >= sum(ranks_by_role(subject.config).values()) else None


def _is_here(subject: Subject) -> bool:
    """Whether this machine is one of the run's nodes: the controller is on one, but under Ray."""
    return not subject.for_job and subject.config.run.launcher != "ray"


def _node(subject: Subject) -> tuple[float | None, str]:
    """Bytes of a node's memory, None if they are not known here, and who says so."""
    config = subject.config
    if _is_here(subject):
        return psutil.virtual_memory().total, "this machine has"
    asked = config.slurm.memory_per_node or ""
    if (found := re.fullmatch(r"(\d+)([KMGT]?)B?", asked.upper())) and int(found[1]):  # 0: all that a node has
        return float(int(found[1]) * _UNITS[found[2]]), f"slurm.memory_per_node={asked} asks for"
    return None, ""


def _given(config: RunConfig) -> str:
    section = config.learner.offload
    given = section.model_dump(exclude_defaults=True, exclude={"activations"})
    given |= {f"activations.{part}": "true" for part in section.activations.parts}
    texts = [f"learner.offload.{key}={value}" for key, value in given.items()]
    if (rank := config.learner.lora.rank) is not None:
        texts.append(f"learner.lora.rank={rank}")
    return " ".join(texts)
