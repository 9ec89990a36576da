"""Packs, unpacks and verifies the parcels that one process sends and receives in a plan.

A pair's transfers are divided into flat buckets of bounded size. A parcel is a bucket's bytes and, if digests are on, a
trailer: the version, then a 64-bit digest of each part as packed. After unpacking, the receiver computes each part's
digest again from the tensor that holds it, strided or not, so it compares what will be served. On a CPU every part is
small enough to be still in the cache when its digest is computed.

Digests are XXH3 of bytes in CPU memory, and a sum in torch of bytes on a GPU. Both ends of a move use one kind. They
detect corruption, not forgery. XXH3 (Cyan4973/xxHash) reads cached bytes several times as fast as memory delivers
them, so a piece of at most `PIECE_BYTES` is hashed right after it was copied.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.errors import CorruptionError, WeightError
from rl_megatron.weights.boxes import Box, Shape, shift, volume, whole_box
from rl_megatron.weights.bytes.bits import stored_dtype
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checks.reports import parameter_kind
from rl_megatron.weights.plans.plan import LayerOrder, Plan, Transfer
from rl_megatron.weights.routes.rendezvous import Peers

if TYPE_CHECKING:
    from rl_megatron.feature import Encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPart:
    """A box small enough for a bucket, in both processes' tensors."""

    src_param: str
    src_box: Box
    dst_param: str
    dst_box: Box

    @property
    def num_elements(self) -> int:
        """The number of elements of either box."""
        return volume(self.dst_box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parts of one pair of processes and one dtype (the destination's), laid one after the other.

    They arrive in ``layer_position`` of the receiver; ``number`` counts the pair's buckets in it.
    """

    dtype: torch.dtype
    layer_position: int
    number: int
    parts: list[BucketPart]

    @property
    def num_bytes(self) -> int:
        """The size of all parts."""
        return self.dtype.itemsize * sum(part.num_elements for part in self.parts)


def cut_into_buckets(
    transfers: Iterable[Transfer],
    dtype_of: Callable[[str], torch.dtype],
    bucket_bytes: int,
    part_bytes: int | None = None,
    turn_of: Callable[[Transfer], int] = lambda moved: 0,
) -> list[Bucket]:
    """Buckets of one pair's transfers, of at most ``bucket_bytes`` or one element; equal for sender and receiver.

    ``dtype_of`` gives the dtype of a destination tensor. ``part_bytes`` bounds a part (None: like a bucket).
    ``turn_of`` gives the receiver's turn; they are in the order of turns.
    """
    largest = min(bucket_bytes, part_bytes or bucket_bytes)
    out: list[Bucket] = []
    free = 0
    for t in sorted(transfers, key=lambda t: (turn_of(t), str(dtype_of(t.dst_param)))):
        dtype, turn = dtype_of(t.dst_param), turn_of(t)
        sizes = tuple(stop - start for start, stop in t.dst_box)
        own = whole_box(sizes)
        for cut in _split(sizes, max(1, largest // dtype.itemsize)):
            num_bytes = volume(cut) * dtype.itemsize
            last = out[-1] if out and out[-1].layer_position == turn else None
            if last is None or last.dtype != dtype or num_bytes > free:
                out.append(Bucket(dtype=dtype, layer_position=turn, number=last.number + 1 if last else 0, parts=[]))
                free = bucket_bytes
            free -= num_bytes
            src_box, dst_box = shift(cut, own, t.src_box), shift(cut, own, t.dst_box)
            out[-1].parts.append(
                BucketPart(src_param=t.src_param, src_box=src_box, dst_param=t.dst_param, dst_box=dst_box)
            )
    return out


def _split(sizes: Shape, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that tile ``sizes``: runs of whole rows where one row fits."""
    row = prod(sizes[1:])
    if row * sizes[0] <= limit:
        yield whole_box(sizes)
    elif row <= limit:
        for start in range(0, sizes[0], limit // row):
            yield ((start, min(start + limit // row, sizes[0])), *((0, size) for size in sizes[1:]))
    else:
        for start in range(sizes[0]):
            for rest in _split(sizes[1:], limit):
                yield ((start, start + 1), *rest)


_WORD = 8  # bytes of a digest
_DEVICE_PIECE_BYTES = 2**26  # a piece of a GPU's local copy, which an error names
_MAX_LISTED_PROBLEMS = 10  # problems of a process that an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """A process's destination dtypes, by `parameter_kind` tensors, and those of the few that differ from others of a
    kind."""

    kinds: Mapping[str, torch.dtype]
    others: Mapping[str, torch.dtype]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Dtypes:
        """The dtypes of ``tensors``, by their names; the first of a kind gives its dtype."""
        kinds: dict[str, torch.dtype] = {}
        for name, tensor in tensors.items():
            kinds.setdefault(parameter_kind(name), tensor.dtype)
        return cls(kinds=kinds, others={n: t.dtype for n, t in tensors.items() if t.dtype != kinds[parameter_kind(n)]})

    def find(self, name: str) -> torch.dtype | None:
        """The dtype of one tensor; None if the process has none of its kind."""
        return self.others.get(name) or self.kinds.get(parameter_kind(name))

    def to_json(self) -> list[Any]:
        """Returns the value that `from_json` reads."""
        return [{name: stored_dtype(dtype) for name, dtype in some.items()} for some in (self.kinds, self.others)]

    @classmethod
    def from_json(cls, kinds: Mapping[str, str], others: Mapping[str, str]) -> Dtypes:
        """Raises ValueError for another type."""
        read = ({name: getattr(torch, DType(dtype)) for name, dtype in some.items()} for some in (kinds, others))
        return cls(**dict(zip(("kinds", "others"), read, strict=True)))


Handshake = tuple[list[str], Dtypes]
"""A process's message to the others before the first version: its misfits with the plan, its destination dtypes."""


@dataclass(frozen=True, kw_only=True)
class BoundBucket:
    """A bucket bound to this process: ``views[i]``, inside ``buffer``, carries ``tensors[i]``."""

    peer: int
    bucket: Bucket
    is_outgoing: bool
    buffer: Tensor  # [bytes on the wire] uint8
    payload: Tensor  # [bucket.num_bytes] uint8, the start of buffer
    trailer: Tensor  # [1 + parts] int64, the end of buffer; [0] without digests
    views: list[Tensor]
    local_tensors: Mapping[str, Tensor]  # the process's tensors, by name

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Found when the first version leaves or arrives: tensors that come and go have no memory before."""
        found = []
        for part in self.bucket.parts if self.views else ():
            name, box = (part.src_param, part.src_box) if self.is_outgoing else (part.dst_param, part.dst_box)
            found.append(view(self.local_tensors[name], box))
        return found

    @cached_property
    def written(self) -> list[memoryview | None]:
        """The bytes copied of each part, on a CPU; None where they lie strided."""
        copied = self.views if self.is_outgoing else self.tensors
        return [tensor_bytes(tensor) if tensor.is_contiguous() else None for tensor in copied]


class PlanEndpoint:
    """A process's sends, receives and copies within itself; ``src`` and ``dst`` are its tensors by local name.

    ``exchange`` sends this process's handshake and returns those of all. If any process has a missing, unknown or
    misshapen tensor, all raise WeightError, which names tensor and rank. The sender casts elements to the destination's
    dtype. It refers to the tensors' storage: change them in place; a destination's may have no memory before a parcel
    for it is ``arriving``, without digests. If any tensor is on the accelerator, parcels are
    too; other tensors may be in host memory.
    """

    def __init__(
        self,
        moves: Plan,
        *,
        rank: int,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        exchange: Callable[[Handshake], Sequence[Handshake]],
        verify: bool,
    ) -> None:
        self.rank, self.verify = rank, verify
        self.src = {name: tensor.detach() for name, tensor in src.items()}
        self.dst = {name: tensor.detach() for name, tensor in dst.items()}
        devices = {t.device for t in (*self.dst.values(), *self.src.values())}
        self.device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        receives, sends = list(moves.receives(rank)), list(moves.sends(rank))
        local = [t for t in receives if t.src_rank == rank]
        problems = list(_misfits([*local, *sends], receives, self.src, self.dst))
        handshakes = exchange((problems, Dtypes.from_tensors(self.dst)))
        lines = [
            f"rank {r}: {line}" for r, (found, _) in enumerate(handshakes) for line in found[:_MAX_LISTED_PROBLEMS]
        ]
        if lines:
            raise WeightError("\n".join(lines))
        self._dtypes, self._turns = [dtypes for _, dtypes in handshakes], LayerOrder(moves)
        self._pairs: dict[tuple[int, int], list[Transfer]] = {}
        for t in (*receives, *sends):
            if t.src_rank != t.dst_rank:
                self._pairs.setdefault((t.src_rank, t.dst_rank), []).append(t)
        piece = PIECE_BYTES if self.device.type == "cpu" else _DEVICE_PIECE_BYTES
        pieces = cut_into_buckets(local, partial(self._dtype, rank), piece)
        self._local = [part for bucket in pieces for part in bucket.parts]
        self._local_src = [view(self.src[part.src_param], part.src_box) for part in self._local]
        self._local_dst = [view(self.dst[part.dst_param], part.dst_box) for part in self._local]
        self._failures: list[str] = []
        self._verify_seconds = 0.0
        self.arriving: Callable[[Bucket], None] = lambda bucket: None  # called with each bucket before it is unpacked
        self.arrived: Callable[[Bucket], None] = lambda bucket: None  # called with each bucket after that
        self.encoder: Encoder | None = None  # encodes what is sent, without digests
        self.bytes_sent: Counter[int] = Counter()  # bytes of a move, by receiver

    def buckets(self, bytes_into: Callable[[int], int]) -> dict[tuple[int, int], list[Bucket]]:
        """The buckets of every pair (sender, receiver) with this process, of at most ``bytes_into`` the receiver.

        Both sides cut them alike: into parts that fit a CPU's cache, or whole buckets on a GPU.
        """
        return {pair: self.split_buckets(pair[1], moved, bytes_into(pair[1])) for pair, moved in self._pairs.items()}

    def split_buckets(self, receiver: int, moved: Iterable[Transfer], bucket_bytes: int) -> list[Bucket]:
        """The buckets of a pair's transfers into ``receiver``, as `buckets` has them."""
        part_bytes = PIECE_BYTES if self.device.type == "cpu" else bucket_bytes
        return cut_into_buckets(moved, partial(self._dtype, receiver), bucket_bytes, part_bytes, self._turns.position)

    def dtype_received(self, name: str) -> torch.dtype:
        """The dtype in which the last process that has such a tensor holds a destination tensor."""
        return next(dtype for dtypes in reversed(self._dtypes) if (dtype := dtypes.find(name)) is not None)

    def _dtype(self, receiver: int, name: str) -> torch.dtype:
        found = self._dtypes[receiver].find(name)
        assert found is not None, name  # the plan writes nothing else there: `_misfits`
        return found

    def wire_bytes(self, bucket: Bucket) -> int:
        """Bytes of the bucket's parcel: payload, padding to a word, and a trailer with digests."""
        return _padded(bucket.num_bytes) + (_WORD * (1 + len(bucket.parts)) if self.verify else 0)

    def bind(self, peer: int, bucket: Bucket, buffer: Tensor, *, leaving: bool) -> BoundBucket:
        """The parcel of ``bucket`` at the start of ``buffer``, which is aligned to a word and may be longer."""
        self.bytes_sent[peer] += bucket.num_bytes if leaving else 0
        payload = buffer[: bucket.num_bytes]
        flat, views, start = payload.view(bucket.dtype), [], 0
        for part in bucket.parts:
            sizes = [high - low for low, high in (part.src_box if leaving else part.dst_box)]
            views.append(flat[start : start + part.num_elements].view(sizes))
            start += part.num_elements
        used = buffer[: self.wire_bytes(bucket)]
        return BoundBucket(
            peer=peer,
            bucket=bucket,
            is_outgoing=leaving,
            buffer=used,
            payload=payload,
            trailer=used[_padded(bucket.num_bytes) :].view(torch.int64),
            views=views,
            local_tensors=self.src if leaving else self.dst,
        )

    def begin(self) -> None:
        """Forgets the failures of the last version, and does the local copies."""
        self._failures, self._verify_seconds = [], 0.0
        if not self.verify:
            if self._local:
                torch._foreach_copy_(self._local_dst, self._local_src)
            return
        if self.device.type != "cpu":
            self._copy_on_device()
            return
        for part, source, target in zip(self._local, self._local_src, self._local_dst, strict=True):
            target.copy_(source)
            started = time.perf_counter()
            held, wanted = digest(tensor_bytes(target)), digest(tensor_bytes(source.to(target.dtype)))
            self._verify_seconds += time.perf_counter() - started
            if held != wanted:
                self._failures.append(self._difference(part, self.rank))

    def _copy_on_device(self) -> None:
        """Does the local copies, and waits once for all of their digests."""
        if not self._local:
            return
        torch._foreach_copy_(self._local_dst, self._local_src)
        started = time.perf_counter()
        wanted = tensor_digests(
            source.to(self.device, target.dtype)
            for source, target in zip(self._local_src, self._local_dst, strict=True)
        )
        held = tensor_digests(target.to(self.device) for target in self._local_dst)
        wrong = (held != wanted).nonzero().flatten().tolist()
        self._verify_seconds += time.perf_counter() - started
        self._failures += (self._difference(self._local[i], self.rank) for i in wrong)

    def pack(self, parcel: BoundBucket, version: int) -> None:
        """Fills the parcel's buffer."""
        if self.encoder is not None:
            for part, to, frm in zip(parcel.bucket.parts, parcel.views, parcel.tensors, strict=True):
                if not self.encoder.pack(part.dst_param, part.src_param, part.src_box, to):
                    to.copy_(frm)
        elif not self.verify:
            torch._foreach_copy_(parcel.views, parcel.tensors)
        elif self.device.type == "cpu":
            sums = self._copy(parcel.views, parcel.tensors, parcel.written)
            _words(parcel.trailer)[:] = [version, *sums]
        else:
            torch._foreach_copy_(parcel.views, parcel.tensors)
            parcel.trailer[0] = version
            parcel.trailer[1:] = tensor_digests(parcel.views)

    def unpack(self, parcel: BoundBucket, version: int) -> None:
        """Writes the parcel's tensors, and records those that differ from what was sent, for `finish`."""
        self.arriving(parcel.bucket)
        self._unpack(parcel, version)
        self.arrived(parcel.bucket)

    def _unpack(self, parcel: BoundBucket, version: int) -> None:
        if not self.verify:
            torch._foreach_copy_(parcel.tensors, parcel.views)
            return
        parts = parcel.bucket.parts
        if self.device.type == "cpu":
            sums = self._copy(parcel.tensors, parcel.views, parcel.written)
            sent_version, *sent = _words(parcel.trailer).tolist()
            wrong = [i for i, pair in enumerate(zip(sums, sent, strict=True)) if pair[0] != pair[1]]
        else:
            torch._foreach_copy_(parcel.tensors, parcel.views)
            started = time.perf_counter()
            sent_version = int(parcel.trailer[0])
            held = [tensor.to(self.device) for tensor in parcel.tensors]  # back, where they lie in host memory
            wrong = (tensor_digests(held) != parcel.trailer[1:]).nonzero().flatten().tolist()
            self._verify_seconds += time.perf_counter() - started
        if sent_version != version:
            self._failures.append(f"a parcel of rank {parcel.peer} says that it is of version {sent_version}")
        self._failures += (self._difference(parts[i], parcel.peer) for i in wrong)

    def settle(self) -> None:
        """Waits until packing and unpacking are done, which on a GPU are asynchronous."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self, version: int) -> float:
        """Seconds spent on digests. Raises CorruptionError with the failures that `begin` and `unpack` recorded."""
        if self._failures:
            told = self._failures[:_MAX_LISTED_PROBLEMS]
            more = len(self._failures) - len(told)
            raise CorruptionError(
                f"version {version} did not arrive whole at rank {self.rank} and is not served:\n"
                + "\n".join(told + ([f"and {more} more"] if more else []))
            )
        return self._verify_seconds

    def _copy(self, to: list[Tensor], frm: list[Tensor], written: list[memoryview | None]) -> list[int]:
        """Copies CPU tensors, and returns the digest of each, computed while it is still in the cache."""
        out, spent, clock = [], 0.0, time.perf_counter
        for target, source, data in zip(to, frm, written, strict=True):
            target.copy_(source)
            started = clock()
            out.append(digest(tensor_bytes(target) if data is None else data))
            spent += clock() - started
        self._verify_seconds += spent
        return out

    def _difference(self, part: BucketPart, sender: int) -> str:
        return (
            f"{part.dst_param} {part.dst_box} on rank {self.rank} is not {part.src_param} {part.src_box} "
            f"as rank {sender} sent it"
        )


def exchange_handshakes(peers: Peers) -> Callable[[Handshake], list[Handshake]]:
    """The ``exchange`` of `PlanEndpoint` between the plan's processes."""

    def exchange(mine: Handshake) -> list[Handshake]:
        problems, dtypes = mine
        return [
            (list(map(str, told)), Dtypes.from_json(*kinds))
            for told, kinds in peers.gather([problems, dtypes.to_json()])
        ]

    return exchange


def view(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


def _words(trailer: Tensor) -> NDArray[np.uint64]:
    return trailer.numpy().view(np.uint64)


def _misfits(
    leaving: Sequence[Transfer], arriving: Sequence[Transfer], src: Mapping[str, Tensor], dst: Mapping[str, Tensor]
) -> Iterator[str]:
    """Lines that say why this process's tensors do not fit the plan."""
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


PIECE_BYTES = 256 * 2**10  # fits a core's second-level cache together with its copy
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDENED = 2**22  # words of a GPU's tensor that are 8 bytes wide at a time, three times
_KEY = -7046029254386353131  # odd, 2**64 over the golden ratio


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in order: a view if CPU memory holds them contiguously, else a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def digest(data: memoryview) -> int:
    """The digest of bytes, as an unsigned number."""
    from xxhash import xxh3_64_intdigest  # engines' environments may lack it: they receive weights without digests

    return xxh3_64_intdigest(data)


def tensor_digests(tensors: Iterable[Tensor]) -> Tensor:
    """[number of tensors] int64 on their device, without waiting for it. Takes one of them after the other.

    A tensor's digest is the sum of its mixed words, each times an odd number of its position, modulo 2**64. One wrong
    word always changes it; several, or words that changed places, change it except in about one case in 2**63.
    """
    return torch.stack([_sum_of_words(tensor.detach().contiguous().view(-1).view(torch.uint8)) for tensor in tensors])


def _sum_of_words(data: Tensor) -> Tensor:
    size = next(size for size in _WORDS if data.numel() % size == 0)
    words = (data if data.storage_offset() % size == 0 else data.clone()).view(_WORDS[size])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, len(words), _WIDENED):
        some = words[first : first + _WIDENED].to(torch.int64, copy=True)
        places = torch.arange(first + 1, first + 1 + len(some), device=data.device)
        total += _mix(some, 29).mul_(_mix(places, 31).bitwise_or_(1)).sum()
    return total


def _mix(numbers: Tensor, shift: int) -> Tensor:
    """Mixes bits in place, one to one. Otherwise differences in the high bits alone, as of two signs, could cancel in
    the sum."""
    numbers.mul_(_KEY)
    return numbers.bitwise_xor_(numbers >> shift)
