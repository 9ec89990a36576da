"""Sends JSON between processes that work together. Nothing from a network is unpickled:

gloo and NCCL accept any process that reaches them (docs/security.md), and reading a pickle executes it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from typing_extensions import override

from rl_megatron.errors import SyncError

_MOST_BYTES = 2**30


class Peers(Protocol):
    """Processes that a plan numbers from 0 on, of which this one is ``rank`` of ``size``."""

    rank: int
    size: int

    def gather(self, mine: object) -> list[Any]:
        """Each process's value, by rank. Collective; raises SyncError if a process is lost."""
        ...


class GroupPeers(Peers):
    """The processes of a group; None: the default group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self.size = group, dist.get_world_size(group)
        self.rank = dist.get_rank() if group is None else group.rank()

    @override
    def gather(self, mine: object) -> list[Any]:
        return gather(mine, self._group)


def gather(mine: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Each process's value, by rank. Collective; raises SyncError if a process sends no JSON or is lost."""
    device, size = wire_device(group), dist.get_world_size(group)
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    with _lost():
        dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = _checked(max(int(length) for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    said = [torch.zeros_like(padded) for _ in range(size)]
    with _lost():
        dist.all_gather(said, padded, group=group)
    return [_read(one[: int(length)], rank) for rank, (one, length) in enumerate(zip(said, lengths, strict=True))]


@contextmanager
def _lost() -> Iterator[None]:
    """Turn the broken connections of a lost process into a SyncError, which fails the push but not this process."""
    try:
        yield
    except RuntimeError as error:
        raise SyncError(f"a process of the group was lost: {str(error).splitlines()[0]}") from error


def wire_device(group: dist.ProcessGroup | None) -> str:
    """The device of what a group carries, as torch chooses it for objects: NCCL carries only GPU memory."""
    return str(distributed_c10d._get_object_coll_device(group))


def deflated(said: object) -> bytes:
    """A value as compressed JSON. Raises SyncError if that is of more than 1 GiB."""
    data = json.dumps(said).encode()
    _checked(len(data))
    return zlib.compress(data, 1)


def inflated(data: bytes, rank: int) -> Any:
    """The value that rank ``rank`` `deflated`. Raises SyncError if it did not, or if it is of more than 1 GiB."""
    inflate = zlib.decompressobj()
    try:
        said = inflate.decompress(data, _MOST_BYTES + 1)
        if not inflate.eof:
            raise ValueError(f"it is cut off, or has more than {_MOST_BYTES} bytes")
        return json.loads(said)
    except (ValueError, zlib.error) as error:
        raise SyncError(f"rank {rank} sent no compressed JSON: {error}") from error


def _checked(length: int) -> int:
    if not 0 <= length <= _MOST_BYTES:
        raise SyncError(f"a process of the group announced {length} bytes, of {_MOST_BYTES} at most")
    return length


def _read(data: Tensor, rank: int) -> Any:
    try:
        return json.loads(data.cpu().numpy().tobytes())
    except ValueError as error:
        raise SyncError(f"rank {rank} of the group sent no JSON: {error}") from error
