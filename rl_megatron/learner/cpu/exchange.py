"""Exchanges buffers between ranks on CPUs, in place of gloo's collectives: through memory that ranks of one machine
share, else by sends. Letters: D ranks of a group, n elements of a rank's shard.

A loopback connection moves 1.6 GB/s each way beside two busy ranks, and takes their cores to do so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config.sections.weights import NODE_MEMORY

SHARED_BYTES = 32 << 20  # of a group
_MOST_RANKS = 8  # that share them: of more, a piece would be smaller than the wait for it is worth
_LONGEST_NAME = 64


def reduce_scatter(own: Tensor, buffer: Tensor, *, group: dist.ProcessGroup) -> None:
    """Sum a rank's shard of all ranks' ``buffer`` [D * n] into its ``own`` [n], which may be its shard itself. Every
    rank of the group calls it."""
    shards = buffer.chunk(group.size())
    _put(own, shards[group.rank()])
    if (shared := _shared_by(group)) is not None:
        shared.sum(own, shards, group)
        return
    arriving = {rank: torch.empty_like(own) for rank in _others(group)}
    _send({rank: (shards[rank], shard) for rank, shard in arriving.items()}, group)
    for shard in arriving.values():
        own.add_(shard)


def all_gather(buffer: Tensor, own: Tensor, *, group: dist.ProcessGroup) -> None:
    """Write each rank's ``own`` [n] into its shard of all ranks' ``buffer`` [D * n], which may be its place already.
    Every rank of the group calls it."""
    shards = buffer.chunk(group.size())
    _put(shards[group.rank()], own)
    if (shared := _shared_by(group)) is not None:
        shared.gather(shards, own, group)
        return
    _send({rank: (own, shards[rank]) for rank in _others(group)}, group)


def _put(into: Tensor, x: Tensor) -> None:
    if into.data_ptr() != x.data_ptr():
        into.copy_(x)


def _others(group: dist.ProcessGroup) -> list[int]:
    """The group's other ranks, each rank beginning with a different one."""
    rank, size = group.rank(), group.size()
    return [(rank + step) % size for step in range(1, size)]


def _send(pairs: dict[int, tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> None:
    """Send the first tensor of a pair to the rank that it is for, and receive the second from it."""
    calls = []
    for rank, (leaving, arriving) in pairs.items():
        calls.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=rank))
        calls.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=rank))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


class _Shared:
    """Memory of a group's ranks: two halves, in which each has a row of D pieces. While ranks read one half, they may
    already write the other: when all have written it, all have read the one. It does not keep the group alive."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self._halves = torch.frombuffer(memory, dtype=torch.uint8).view(2, size, size, -1)
        self._turn = 0

    def sum(self, own: Tensor, shards: tuple[Tensor, ...], group: dist.ProcessGroup) -> None:
        """Add the others' shards to ``own``, in the order of `_others`."""
        mine, others = group.rank(), _others(group)
        for part in _parts(own, self._halves[0, 0, 0].nbytes):
            half = self._next()
            for rank in others:
                _as(half[mine, rank], own[part]).copy_(shards[rank][part])
            _meet(group)
            for rank in others:
                own[part] += _as(half[rank, mine], own[part])

    def gather(self, shards: tuple[Tensor, ...], own: Tensor, group: dist.ProcessGroup) -> None:
        """Write the others' ``own`` into their shards."""
        for part in _parts(own, self._halves[0, 0].nbytes):
            rows = self._next().flatten(1)
            _as(rows[group.rank()], own[part]).copy_(own[part])
            _meet(group)
            for rank in _others(group):
                shards[rank][part] = _as(rows[rank], own[part])

    def _next(self) -> Tensor:
        self._turn = 1 - self._turn
        return self._halves[self._turn]


def _meet(group: dist.ProcessGroup) -> None:
    group.allreduce([torch.zeros(1)]).wait()  # at once: megatron has torch's functions put calls off


def _parts(x: Tensor, num_bytes: int) -> Iterator[slice]:
    step = num_bytes // x.element_size()
    return (slice(start, min(start + step, len(x))) for start in range(0, len(x), step))


def _as(memory: Tensor, x: Tensor) -> Tensor:
    """The first bytes of ``memory`` as a tensor like ``x``."""
    return memory[: x.nbytes].view(x.dtype)


_SHARED: WeakKeyDictionary[dist.ProcessGroup, _Shared | None] = WeakKeyDictionary()


def _shared_by(group: dist.ProcessGroup) -> _Shared | None:
    """What a group's ranks share, which its first exchange makes; None of ranks on several machines, or without room
    for it."""
    if group not in _SHARED:
        _SHARED[group] = _make(group) if 1 < group.size() <= _MOST_RANKS else None
    return _SHARED[group]


def _make(group: dist.ProcessGroup) -> _Shared | None:
    """The first rank makes a file, whose name goes once the others have opened it."""
    pieces = 2 * group.size() ** 2
    size = SHARED_BYTES // pieces // 64 * 64 * pieces
    file: IO[bytes] | None = None
    name = ""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there is no room for it
            if group.rank() == 0:
                made = stack.enter_context(tempfile.NamedTemporaryFile(prefix="rl_megatron-", dir=NODE_MEMORY))
                os.posix_fallocate(made.fileno(), 0, size)
                file, name = made.file, Path(made.name).name
        name = _told(name, group)
        with contextlib.suppress(OSError):  # it is on another machine
            if group.rank() and name:
                file = stack.enter_context((NODE_MEMORY / name).open("r+b"))
        have = torch.tensor([int(file is not None)])
        group.allreduce([have], dist.ReduceOp.MIN).wait()
        return _Shared(mmap.mmap(file.fileno(), size), group.size()) if file is not None and have.item() else None


def _told(name: str, group: dist.ProcessGroup) -> str:
    """The first rank's name."""
    told = torch.zeros(_LONGEST_NAME, dtype=torch.uint8)
    told[: len(name)] = torch.tensor([*name.encode()], dtype=torch.uint8)
    group.broadcast(told, 0).wait()
    return bytes(told.tolist()).rstrip(b"\0").decode()
