"""Executes a plan over one torch.distributed group, gloo and NCCL alike: every process runs the same schedule.

In round k each process sends to the one k places after it and receives from the one k places before it, so nobody is
hit by two senders at once. A pair's transfers are packed into flat buckets; while one bucket is under way the next is
packed, so a process holds two send and two receive buffers, made once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.errors import WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.layout import Box, Shape
from rl_megatron.weights.plan import Transfer

_Dtypes = Mapping[str, torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A box small enough for a bucket, in both processes' tensors."""

    src_param: str
    src_box: Box
    dst_param: str
    dst_box: Box

    @property
    def sizes(self) -> Shape:
        return tuple(stop - start for start, stop in self.dst_box)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Parts of one pair of processes and one dtype (the destination's), laid one behind the other."""

    dtype: torch.dtype
    parts: list[_Part]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * sum(prod(part.sizes) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A bucket bound to this process: ``views[i]``, inside ``buffer``, carries ``tensors[i]``."""

    peer: int
    buffer: Tensor  # [num_bytes] uint8
    views: list[Tensor]
    tensors: list[Tensor]


class ProcessGroupTransport:
    """Moves the plan's weights each time ``move`` is called. Every process of ``group`` makes one and calls it alike.

    Ranks in ``transfers`` are ranks of ``group`` (None: the default group). ``src`` and ``dst`` are this process's
    tensors by local name: all that the plan reads or writes here, and in ``dst`` nothing else. They are held by
    storage, so change them in place. Elements are cast to the destination's dtype before they are sent; no buffer
    is larger than ``bucket_bytes``. Making one is collective: a missing, unknown or misshapen tensor on any process
    raises WeightError, naming tensor and rank, on all.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        *,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 256 * 2**20,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        src = {name: tensor.detach() for name, tensor in src.items()}
        dst = {name: tensor.detach() for name, tensor in dst.items()}
        self._device = next((tensor.device for tensor in (*dst.values(), *src.values())), torch.device("cpu"))
        dtypes = self._agree(list(_misfits(transfers, self._rank, src, dst)), dst)

        local = [t for t in transfers if t.src_rank == t.dst_rank == self._rank]
        self._local_src = [_view(src[t.src_param], t.src_box) for t in local]
        self._local_dst = [_view(dst[t.dst_param], t.dst_box) for t in local]
        self._num_bytes = sum(
            _volume(t.dst_box) * dtypes[t.dst_rank][t.dst_param].itemsize for t in transfers if t.src_rank != t.dst_rank
        )
        self._steps = self._schedule(transfers, dtypes, src, dst, bucket_bytes)

    def move(self, version: int) -> WeightUpdate:
        """Write every destination tensor in place; the data is there when this returns. All processes call it.

        ``num_bytes`` is the whole plan's, not this process's, and without copies that stay in a process. A failure
        leaves ``dst`` in part written: serve ``version`` only after every process has returned.
        """
        started = time.perf_counter()
        if self._local_dst:
            torch._foreach_copy_(self._local_dst, self._local_src)
        under_way: tuple[list[dist.Work], _Message | None] = ([], None)
        for send, receive in self._steps:
            works = self._post(send, receive)
            _finish(*under_way)
            under_way = (works, receive)
        _finish(*under_way)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return WeightUpdate(version=version, num_bytes=self._num_bytes, seconds=time.perf_counter() - started)

    def _agree(self, problems: list[str], dst: Mapping[str, Tensor]) -> list[_Dtypes]:
        """Every rank's destination dtypes, so that sender and receiver cut the same buckets; or everyone's problems."""
        mine = (problems, {name: tensor.dtype for name, tensor in dst.items()})
        reports: list[tuple[list[str], dict[str, torch.dtype]]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, mine, group=self._group)
        lines = [f"rank {rank}: {line}" for rank, (found, _) in enumerate(reports) for line in found[:10]]
        if lines:
            raise WeightError("\n".join(lines))
        return [dtypes for _, dtypes in reports]

    def _schedule(
        self,
        transfers: Sequence[Transfer],
        dtypes: Sequence[_Dtypes],
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        bucket_bytes: int,
    ) -> list[tuple[_Message | None, _Message | None]]:
        """(send, receive) of each step, in the order (round, bucket) that all processes share."""
        pairs: dict[tuple[int, int], list[Transfer]] = {}
        for t in transfers:
            if t.src_rank != t.dst_rank and self._rank in (t.src_rank, t.dst_rank):
                pairs.setdefault((t.src_rank, t.dst_rank), []).append(t)
        buckets = {pair: _buckets(moved, dtypes[pair[1]], bucket_bytes) for pair, moved in pairs.items()}
        size = dist.get_world_size(self._group)
        rounds: list[tuple[int, _Bucket | None, int, _Bucket | None]] = []
        for k in range(1, size):
            to, frm = (self._rank + k) % size, (self._rank - k) % size
            sends, receives = buckets.get((self._rank, to), []), buckets.get((frm, self._rank), [])
            rounds.extend((to, out, frm, into) for out, into in zip_longest(sends, receives))
        outgoing = self._two_buffers([out for _, out, _, _ in rounds])
        incoming = self._two_buffers([into for _, _, _, into in rounds])
        return [
            (
                _bind(out, to, outgoing[i % 2], [_view(src[p.src_param], p.src_box) for p in out.parts])
                if out
                else None,
                _bind(into, frm, incoming[i % 2], [_view(dst[p.dst_param], p.dst_box) for p in into.parts])
                if into
                else None,
            )
            for i, (to, out, frm, into) in enumerate(rounds)
        ]

    def _two_buffers(self, buckets: Sequence[_Bucket | None]) -> list[Tensor]:
        """Used in turn: a step's buffer is free again two steps later."""
        largest = max((bucket.num_bytes for bucket in buckets if bucket), default=0)
        return [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _post(self, send: _Message | None, receive: _Message | None) -> list[dist.Work]:
        ops: list[dist.P2POp] = []
        if receive is not None:
            ops.append(dist.P2POp(dist.irecv, receive.buffer, group=self._group, group_peer=receive.peer))
        if send is not None:
            torch._foreach_copy_(send.views, send.tensors)
            ops.append(dist.P2POp(dist.isend, send.buffer, group=self._group, group_peer=send.peer))
        return list(dist.batch_isend_irecv(ops))


def _finish(works: Sequence[dist.Work], receive: _Message | None) -> None:
    for work in works:
        work.wait()
    if receive is not None:
        torch._foreach_copy_(receive.tensors, receive.views)


def _misfits(
    transfers: Sequence[Transfer], rank: int, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]
) -> Iterator[str]:
    """Why this process's tensors cannot serve the plan, a line each."""
    wanted_src = {t.src_param: t.src_shape for t in transfers if t.src_rank == rank}
    wanted_dst = {t.dst_param: t.dst_shape for t in transfers if t.dst_rank == rank}
    for side, wanted, tensors in (("source", wanted_src, src), ("destination", wanted_dst, dst)):
        for name, shape in wanted.items():
            if name not in tensors:
                yield f"{side} tensor {name} is missing; the plan needs it with shape {shape}"
            elif tuple(tensors[name].shape) != shape:
                yield f"{side} tensor {name} has shape {tuple(tensors[name].shape)}, the plan's layout says {shape}"
    for name in dst.keys() - wanted_dst.keys():
        yield f"destination tensor {name} is written by no transfer; leave it out or add it to the layout"


def _buckets(transfers: Sequence[Transfer], dtypes: _Dtypes, bucket_bytes: int) -> list[_Bucket]:
    """One pair's transfers cut to at most ``bucket_bytes`` a bucket; sender and receiver compute the same."""
    out: list[_Bucket] = []
    free = 0
    for t in sorted(transfers, key=lambda t: str(dtypes[t.dst_param])):
        dtype = dtypes[t.dst_param]
        sizes = tuple(stop - start for start, stop in t.dst_box)
        for cut in _split(sizes, max(1, bucket_bytes // dtype.itemsize)):
            num_bytes = _volume(cut) * dtype.itemsize
            if not out or out[-1].dtype != dtype or num_bytes > free:
                out.append(_Bucket(dtype=dtype, parts=[]))
                free = bucket_bytes
            free -= num_bytes
            src_box, dst_box = _shift(cut, t.src_box), _shift(cut, t.dst_box)
            out[-1].parts.append(_Part(src_param=t.src_param, src_box=src_box, dst_param=t.dst_param, dst_box=dst_box))
    return out


def _split(sizes: Shape, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that tile ``sizes``: runs of whole rows where one row fits."""
    row = prod(sizes[1:])
    if row * sizes[0] <= limit:
        yield tuple((0, size) for size in sizes)
    elif row <= limit:
        for start in range(0, sizes[0], limit // row):
            yield ((start, min(start + limit // row, sizes[0])), *((0, size) for size in sizes[1:]))
    else:
        for start in range(sizes[0]):
            for rest in _split(sizes[1:], limit):
                yield ((start, start + 1), *rest)


def _bind(bucket: _Bucket, peer: int, buffer: Tensor, tensors: list[Tensor]) -> _Message:
    used = buffer[: bucket.num_bytes]
    flat, views, start = used.view(bucket.dtype), [], 0
    for tensor in tensors:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return _Message(peer=peer, buffer=used, views=views, tensors=tensors)


def _shift(cut: Box, box: Box) -> Box:
    return tuple((low + start, high + start) for (low, high), (start, _) in zip(cut, box, strict=True))


def _view(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def _volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)
