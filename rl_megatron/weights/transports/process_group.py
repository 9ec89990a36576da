"""Executes a plan over one torch.distributed group, gloo and NCCL alike: every process runs the same schedule.

In a round a process sends to one other and receives from one other, so nobody is hit by two senders at once. A pair's
transfers are packed into flat buckets; while one bucket is under way the next is packed, so a process holds two send
and two receive buffers, made once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.errors import WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.buckets import Bucket, cut_into_buckets
from rl_megatron.weights.layout import Box
from rl_megatron.weights.plan import Plan, Rounds, Transfer, volume


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dtypes:
    """A process's destination dtypes: one, and the few tensors that have another."""

    common: torch.dtype
    others: Mapping[str, torch.dtype]

    def of(self, name: str) -> torch.dtype:
        return self.others.get(name, self.common)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A bucket bound to this process: ``views[i]``, inside ``buffer``, carries ``tensors[i]``."""

    peer: int
    buffer: Tensor  # [num_bytes] uint8
    views: list[Tensor]
    tensors: list[Tensor]


class ProcessGroupTransport:
    """Moves the plan's weights each time ``move`` is called. Every process of ``group`` makes one and calls it alike.

    Processes of ``moves`` are ranks of ``group`` (None: the default group). ``src`` and ``dst`` are this process's
    tensors by local name: all that the plan reads or writes here, and in ``dst`` nothing else. They are held by
    storage, so change them in place. Elements are cast to the destination's dtype before they are sent; no buffer
    is larger than ``bucket_bytes``. Making one is collective: a missing, unknown or misshapen tensor on any process
    raises WeightError, naming tensor and rank, on all.
    """

    def __init__(
        self,
        moves: Plan,
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
        receives, sends = list(moves.receives(self._rank)), list(moves.sends(self._rank))
        local = [t for t in receives if t.src_rank == self._rank]
        problems = list(_misfits([*local, *sends], receives, src, dst))
        dtypes, self._num_bytes = self._agree(problems, receives, dst)

        self._local_src = [_view(src[t.src_param], t.src_box) for t in local]
        self._local_dst = [_view(dst[t.dst_param], t.dst_box) for t in local]
        self._steps = self._schedule([*receives, *sends], moves.rounds(), dtypes, src, dst, bucket_bytes)

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

    def _agree(
        self, problems: list[str], receives: Sequence[Transfer], dst: Mapping[str, Tensor]
    ) -> tuple[list[_Dtypes], int]:
        """Every rank's destination dtypes, so that sender and receiver cut the same buckets, and all ranks' bytes.

        Or everyone's problems.
        """
        counts = Counter(tensor.dtype for tensor in dst.values())
        common = counts.most_common(1)[0][0] if counts else torch.float32
        dtypes = _Dtypes(common=common, others={n: t.dtype for n, t in dst.items() if t.dtype != common})
        num_bytes = sum(
            volume(t.dst_box) * dtypes.of(t.dst_param).itemsize for t in receives if t.src_rank != self._rank
        )
        mine = (problems, dtypes, num_bytes)
        reports: list[tuple[list[str], _Dtypes, int]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, mine, group=self._group)
        lines = [f"rank {rank}: {line}" for rank, (found, _, _) in enumerate(reports) for line in found[:10]]
        if lines:
            raise WeightError("\n".join(lines))
        return [dtypes for _, dtypes, _ in reports], sum(received for _, _, received in reports)

    def _schedule(
        self,
        transfers: Sequence[Transfer],
        rounds: Rounds,
        dtypes: Sequence[_Dtypes],
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        bucket_bytes: int,
    ) -> list[tuple[_Message | None, _Message | None]]:
        """(send, receive) of each step, in the order (round, bucket) that all processes share."""
        pairs: dict[tuple[int, int], list[Transfer]] = {}
        for t in transfers:
            if t.src_rank != t.dst_rank:
                pairs.setdefault((t.src_rank, t.dst_rank), []).append(t)
        buckets = {pair: cut_into_buckets(moved, dtypes[pair[1]].of, bucket_bytes) for pair, moved in pairs.items()}
        steps: list[tuple[tuple[int, Bucket] | None, tuple[int, Bucket] | None]] = []
        for to, frm in rounds.of_process(self._rank):
            sends = [(to, out) for out in buckets.get((self._rank, to), [])] if to is not None else []
            receives = [(frm, into) for into in buckets.get((frm, self._rank), [])] if frm is not None else []
            steps.extend(zip_longest(sends, receives))
        outgoing = self._two_buffers([send[1] for send, _ in steps if send])
        incoming = self._two_buffers([receive[1] for _, receive in steps if receive])
        return [
            (
                _bind(*send, outgoing[i % 2], [_view(src[p.src_param], p.src_box) for p in send[1].parts])
                if send
                else None,
                _bind(*receive, incoming[i % 2], [_view(dst[p.dst_param], p.dst_box) for p in receive[1].parts])
                if receive
                else None,
            )
            for i, (send, receive) in enumerate(steps)
        ]

    def _two_buffers(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Used in turn: a step's buffer is free again two steps later."""
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
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
    leaving: Sequence[Transfer], arriving: Sequence[Transfer], src: Mapping[str, Tensor], dst: Mapping[str, Tensor]
) -> Iterator[str]:
    """Why this process's tensors cannot serve the plan, a line each."""
    wanted_src = {t.src_param: t.src_shape for t in leaving}
    wanted_dst = {t.dst_param: t.dst_shape for t in arriving}
    for side, wanted, tensors in (("source", wanted_src, src), ("destination", wanted_dst, dst)):
        for name, shape in wanted.items():
            if name not in tensors:
                yield f"{side} tensor {name} is missing; the plan needs it with shape {shape}"
            elif tuple(tensors[name].shape) != shape:
                yield f"{side} tensor {name} has shape {tuple(tensors[name].shape)}, the plan's layout says {shape}"
    for name in dst.keys() - wanted_dst.keys():
        yield f"destination tensor {name} is written by no transfer; leave it out or add it to the layout"


def _bind(peer: int, bucket: Bucket, buffer: Tensor, tensors: list[Tensor]) -> _Message:
    used = buffer[: bucket.num_bytes]
    flat, views, start = used.view(bucket.dtype), [], 0
    for tensor in tensors:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return _Message(peer=peer, buffer=used, views=views, tensors=tensors)


def _view(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]
