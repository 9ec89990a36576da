"""Reports of engine ranks: additive 64-bit checksums of the boxes that they hold, however they stack and cut tensors.

Checksums of the boxes that a tensor is cut into add up to the tensor's own, so those of engine ranks compare with the
learner's. They detect corruption, not forgery. A tensor is a matrix of words, dim 0 by all others. Its checksum is the
sum of each word times an odd number of its row times an odd number of its column, modulo 2**64. One wrong word always
changes it; several, or words that changed places, change it except in about one case in 2**63. It reads memory as fast
as XXH3, and cached bytes half as fast.

A worker reports a checksum of every box that its loader filled (`make_checksum_report`). The controller adds them up
over the ranks (`compare`). Some kernels convert a parameter to a private layout after the load, where boxes differ from
what was loaded. A server's first load tells such parameters apart from corrupted ones: a private one differs in all
layers and experts, and the probe verifies it. From then on the list is fixed. A rank has the same boxes at every push,
so it names them by a digest to a controller that knows it. Engines import this module: it needs numpy and torch."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, prod
from types import MappingProxyType
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.boxes import Box, Shape, volume, whole_box
from rl_megatron.weights.checks.places import ParameterBox
from rl_megatron.weights.layouts.layout import Layout

_WORDS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
_INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK = 1024  # words of a row; their factors fit a core's first-level cache
_PIECE = 2**25  # words of a GPU tensor that are widened together
_MODULUS = 2**64


def checksum(box: Tensor, whole: tuple[int, ...], start: tuple[int, ...] = ()) -> int:
    """The checksum of a box that begins at ``start`` of a tensor of shape ``whole``; `add` sums those of all boxes.

    Only dims 0 and 1 may be cut. Raises ValueError if a row's share is not made of whole words.
    """
    return box_checksums([(box, whole, start)])[0]


def box_checksums(boxes: Iterable[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    """The `checksum` of each box of one device, given with the shape of its tensor and its start there. A GPU is waited
    for once, after the last."""
    factors = _FactorsOnDevice()
    found = [_sum(*one, factors) for one in boxes]
    on_device = [one for one in found if isinstance(one, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [(next(read) if isinstance(one, Tensor) else one) % _MODULUS for one in found]


def _sum(box: Tensor, whole: tuple[int, ...], start: tuple[int, ...], factors: _FactorsOnDevice) -> int | Tensor:
    """The checksum as a number; of a GPU's tensor as a tensor, [] int64, without waiting for it."""
    if not box.numel():
        return 0
    if box.ndim < 2:  # a row
        box, whole, start = box.reshape(1, -1), (1, *(whole or (1,))), (0, *(start or (0,)))
    rows, columns = len(box), prod(box.shape[1:])
    at = (start[0], start[1] * prod(whole[2:])) if start else (0, 0)
    size = gcd(prod(whole[1:]) * box.dtype.itemsize, 8)
    width, first = columns * box.dtype.itemsize, at[1] * box.dtype.itemsize
    if width % size or first % size:
        raise ValueError(f"columns {at[1]} to {at[1] + columns} of {whole} are not whole words of {size} bytes")
    matrix = box.detach().reshape(rows, columns)
    if matrix.stride(1) != 1 or matrix.stride(0) * box.dtype.itemsize % size or matrix.data_ptr() % size:
        matrix = matrix.contiguous() if matrix.stride(1) != 1 else matrix.clone(memory_format=torch.contiguous_format)
    words = (first // size, (first + width) // size)
    if matrix.device.type != "cpu":
        return _on_device(matrix.view(_INTS[size]), at[0], words, factors)
    seen = np.from_dlpack(matrix.view(_INTS[size]))  # .numpy() would make the storage unresizable
    return _on_cpu(seen.view(_WORDS[size]), at[0], words)


def narrowed(box: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the box to checksum: in ``dtype``, that of its tensor's file, if it is held in a wider one.

    Engines hold routers and decays in float32 whatever the weights' dtype. Values read from a file are cast exactly.
    """
    return box.to(dtype) if dtype.itemsize < box.dtype.itemsize else box


def aligned(whole: tuple[int, ...], box: Box, itemsize: int) -> bool:
    """True if the box's columns are whole words of a tensor of shape ``whole``. A vector is a row of columns."""
    column = prod(whole[2:]) * itemsize
    return not whole or all(at * column % gcd(whole[:2][-1] * column, 8) == 0 for at in box[:2][-1])


def add(*checksums: int) -> int:
    """The checksum of several boxes together."""
    return sum(checksums) % _MODULUS


def _on_cpu(matrix: NDArray[np.unsignedinteger], row: int, words: tuple[int, int]) -> int:
    sums = np.zeros(len(matrix), np.uint64)
    for low, high in _blocks(words, _BLOCK):
        block, factors = matrix[:, low - words[0] : high - words[0]], _factors(high, 31)[low:high]
        sums += np.einsum("ij,j->i", block, factors, dtype=np.uint64, casting="safe")
    return int((sums * _factors(row + len(matrix), 29)[row : row + len(matrix)]).sum())


def _on_device(matrix: Tensor, row: int, words: tuple[int, int], factors: _FactorsOnDevice) -> Tensor:
    mask = (1 << 8 * matrix.dtype.itemsize) - 1
    rows = factors(matrix.device, 29, row, row + len(matrix))
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    for low, high in _blocks(words, max(1, _PIECE // len(matrix))):
        block = matrix[:, low - words[0] : high - words[0]].to(torch.int64)
        block = block & mask if mask < _MODULUS - 1 else block
        total += (block * factors(matrix.device, 31, low, high)).sum(1).mul_(rows).sum()
    return total


def _blocks(words: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    for low in range(words[0], words[1], size):
        yield low, min(low + size, words[1])


_WEIGHTS: dict[int, NDArray[np.uint64]] = {}


def _factors(count: int, shift: int) -> NDArray[np.uint64]:
    """Returns ``count`` odd numbers or more, the same at every call (by splitmix64's mixer)."""
    made = _WEIGHTS.get(shift)
    if made is None or len(made) < count:
        numbers = np.arange(1, max(2 * count, _BLOCK) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
        made = _WEIGHTS[shift] = (numbers ^ (numbers >> np.uint64(27))) | np.uint64(1)
    return made


class _FactorsOnDevice:
    """`_factors` on GPUs, for one call: a copy of each from the host would wait for the GPU."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, device: torch.device, shift: int, low: int, high: int) -> Tensor:
        """[high - low] int64."""
        made = self._made.get((device, shift))
        if made is None or len(made) < high:
            numbers = _factors(high, shift)[: 2 * high].view(np.int64).copy()
            made = self._made[device, shift] = torch.from_numpy(numbers).to(device)
        return made[low:high]


BoxSum = tuple[str, str, Box, int]
"""Parameter, Hugging Face tensor, its box, and the checksum of the parameter's memory there."""


Read = tuple[str, Box, int]
"""Hugging Face tensor, its box, and the checksum of the bytes that arrived."""


Kinds = Mapping[str, frozenset[str]]
"""Server -> kinds of parameters (`parameter_kind`) that its kernels keep in private layouts."""
NO_KINDS: Kinds = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumReport:
    """Checksums of what one rank holds, and the seconds that the rank waited for them.

    ``read`` are checksums of what the rank read or received, before its kernels converted it. ``window`` is the most
    bytes in which it received that, in addition to the parameters. ``changes`` are, of a learner's rank that quantizes,
    squared Frobenius norms of its boxes and of what that changed in them, by tensor.
    """

    rows: Sequence[BoxSum]
    seconds: float
    read: Sequence[Read] = ()
    changes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    window: int = 0


def merge_rank_reports(reports: Sequence[ChecksumReport]) -> ChecksumReport:
    """A rank's reports on several models, or parts of one, as one. None has ``changes``, which are a learner's."""
    if len(reports) == 1:
        return reports[0]
    return ChecksumReport(
        rows=[row for one in reports for row in one.rows],
        seconds=sum(one.seconds for one in reports),
        read=[row for one in reports for row in one.read],
        window=sum(one.window for one in reports),
    )


def parameter_kind(param: str) -> str:
    """A parameter's name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", param)


class BackgroundChecksums:
    """Computes checksums in a separate thread while more tensors arrive. Nothing may write to a tensor meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._held: list[Future[Sequence[BoxSum]]] = []
        self._read: list[Future[Read]] = []

    def read(self, name: str, tensor: Tensor) -> None:
        """Checksums a whole tensor as it was read."""
        self._read_box(name, tensor, tuple(tensor.shape), whole_box(tensor.shape))

    def sent(self, one: ParameterBox, tensor: Tensor) -> list[Future[Read]]:
        """Checksums a received box in a parameter that kernels will convert once this is done. A box that does not
        consist of whole words has no checksum."""
        if not whole_words(one, tensor.dtype.itemsize):
            return []
        return [self._read_box(one.hf, narrowed(one.local_slice(tensor), one.dtype), one.full_shape, one.box)]

    def checksum_boxes(self, held: Sequence[ParameterBox], params: Mapping[str, Tensor]) -> None:
        """Checksums boxes in the parameters that hold them."""
        ready = _ready(params[held[0].param]) if held else None

        def look() -> Sequence[BoxSum]:
            _wait_for(ready)
            return make_checksum_report(held, params).rows

        self._held.append(self._thread.submit(look))

    def report(self) -> ChecksumReport:
        """Waits for all checksums and reports them; ``seconds`` is the time of this wait."""
        started = time.perf_counter()
        rows = [row for future in self._held for row in future.result()]
        read = [future.result() for future in self._read]
        self._thread.shutdown()
        return ChecksumReport(rows=rows, seconds=time.perf_counter() - started, read=read)

    def _read_box(self, name: str, tensor: Tensor, whole: Shape, box: Box) -> Future[Read]:
        ready = _ready(tensor)

        def look() -> Read:
            _wait_for(ready)
            return name, box, checksum(tensor, whole, tuple(low for low, _ in box))

        self._read.append(future := self._thread.submit(look))
        return future


def _ready(tensor: Tensor) -> torch.cuda.Event | None:
    """An event of the tensor's GPU after all work that this thread has queued, for another thread's stream to await."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _wait_for(ready: torch.cuda.Event | None) -> None:
    if ready is not None:
        torch.cuda.set_device(ready.device)  # a new thread has GPU 0, and the wait may open a context there
        ready.synchronize()


def seconds_waited(reports: Mapping[str, Sequence[ChecksumReport]]) -> float:
    """Seconds that the slowest server waited for checksums; its ranks compute them at the same time."""
    return max((report.seconds for said in reports.values() for report in said), default=0.0)


def drop_private(held: Sequence[ParameterBox], private: Collection[str]) -> list[ParameterBox]:
    """The boxes that are not in parameters of ``private`` kinds."""
    return [one for one in held if parameter_kind(one.param) not in private]


def make_checksum_report(held: Sequence[ParameterBox], params: Mapping[str, Tensor]) -> ChecksumReport:
    """Checksums of every box whose parameter is in ``params`` and large enough to hold it."""
    started = time.perf_counter()
    there = [(one, tensor) for one in held if (tensor := params.get(one.param)) is not None]
    there = [(one, t) for one, t in there if fits(one, t) and whole_words(one, t.dtype.itemsize)]
    sums = box_checksums(
        (narrowed(one.local_slice(t), one.dtype), one.full_shape, tuple(low for low, _ in one.box)) for one, t in there
    )
    rows = [(one.param, one.hf, one.box, found) for (one, _), found in zip(there, sums, strict=True)]
    return ChecksumReport(rows=rows, seconds=time.perf_counter() - started)


def fits(one: ParameterBox, tensor: Tensor) -> bool:
    """True if the box lies inside the parameter's memory."""
    size, strides, offset = one.view
    last = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return last < tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


def whole_words(one: ParameterBox, itemsize: int) -> bool:
    """True if the box's columns, `narrowed`, are whole words, so that checksums of its tensor's boxes add up."""
    return aligned(one.full_shape, one.box, min(itemsize, one.dtype.itemsize))


REPORT_FORM = "2"
"""A trainer takes what servers report in this form alone."""

ReportColumn = Literal["rows", "read"]
PlacedBox = tuple[str, str, Box] | tuple[str, Box]
"""A row of a `ChecksumReport` without its checksum."""


def packed_report(report: ChecksumReport, known: Collection[str]) -> dict[str, object]:
    """The report as JSON. It names the boxes of a column unless their `digest_of_boxes` is ``known``; ``sums`` are
    of 64 bits, little-endian, in base64."""
    return {
        "rows": _packed("rows", report.rows, known),
        "read": _packed("read", report.read, known),
        "seconds": report.seconds,
        "window": report.window,
    }


@lru_cache(maxsize=16)  # two columns of two models, before and after kinds are private
def digest_of_boxes(column: ReportColumn, places: tuple[PlacedBox, ...]) -> str:
    """256 bits that name the places of a column, as hexadecimal digits."""
    return hashlib.blake2b(json.dumps([column, places]).encode(), digest_size=32).hexdigest()


def _packed(column: ReportColumn, rows: Sequence[BoxSum] | Sequence[Read], known: Collection[str]) -> dict[str, object]:
    ordered = sorted(rows)  # boxes may arrive in another order at each push
    places = cast(tuple[PlacedBox, ...], tuple(row[:-1] for row in ordered))
    digest, sums = digest_of_boxes(column, places), np.array([row[-1] for row in ordered], "<u8")
    named = {} if digest in known else {"places": places}
    return {"digest": digest, "sums": base64.b64encode(sums.tobytes()).decode(), **named}


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderBox:
    """``place`` of a learner's ``param`` is ``box`` of Hugging Face tensor ``hf``, whose shape is ``full_shape``."""

    param: str
    place: Box
    hf: str
    box: Box
    full_shape: Shape


def sender_boxes(layout: Layout, hf: Layout) -> list[list[SenderBox]]:
    """Returns the boxes that each learner rank checksums: a box's first holder checksums it."""
    shapes: Mapping[str, Shape] = hf.local_shapes(0)
    out: list[list[SenderBox]] = [[] for _ in range(layout.dims.world_size)]
    for spec in layout.rows():
        for chunk, slices in enumerate(layout.chunks(spec)):
            for layer, stages in layout.layer_stages(spec).items():
                for expert in range(layout.shape.num_experts if "{expert}" in spec.name else 1):
                    ep = layout.expert_rank(spec, expert)
                    rank = min(r for stage in stages for r in layout.ranks(spec, chunk, stage, ep))
                    for one in slices:
                        name, param = (n.format(layer=layer, expert=expert) for n in (one.hf, one.param))
                        whole = shapes[name]
                        out[rank].append(
                            SenderBox(param=param, place=one.box, hf=name, box=one.hf_box, full_shape=whole)
                        )
    return out


def sent_checksums(
    sources: Sequence[SenderBox], tensors: Mapping[str, Tensor], sent: Callable[[SenderBox, Tensor], Tensor]
) -> ChecksumReport:
    """Checksums of what engines receive of the learner's boxes: ``sent`` makes it of a box's values."""
    started = time.perf_counter()
    added: list[SenderBox] = []

    def boxes() -> Iterator[tuple[Tensor, Shape, tuple[int, ...]]]:
        for one in sources:
            box = sent(one, tensors[one.param].detach()[tuple(slice(low, high) for low, high in one.place)])
            if checksums_add_up([one], box.dtype.itemsize):
                added.append(one)
                yield box, one.full_shape, tuple(low for low, _ in one.box)

    sums = box_checksums(boxes())
    rows = [(one.param, one.hf, one.box, found) for one, found in zip(added, sums, strict=True)]
    return ChecksumReport(rows=rows, seconds=time.perf_counter() - started)


def checksums_add_up(sources: Sequence[SenderBox], itemsize: int) -> bool:
    """True if all boxes consist of whole words, so that their checksums add up to those of the tensors."""
    return all(aligned(one.full_shape, one.box, itemsize) for one in sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChecksums:
    """Sums of checksums and of elements over the boxes of each tensor; a box that several ranks hold counts once.

    ``torn`` are tensors with a box that has different bytes on two ranks.
    """

    checksums: Mapping[str, int]
    elements: Mapping[str, int]
    torn: Collection[str]

    def is_complete(self, name: str, shape: Shape) -> bool:
        """True if the boxes, which do not overlap, fill the tensor."""
        return self.elements.get(name, 0) == prod(shape)

    def equals(self, name: str, sealed: int) -> bool:
        """True if all ranks that hold a box of the tensor agree, and its checksum is the sealed one."""
        return name not in self.torn and add(self.checksums.get(name, 0)) == sealed


def seal_from_reports(reports: Sequence[ChecksumReport], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Checksums of whole tensors, from the reports of the learner's ranks on their boxes.

    Raises CorruptionError that names a tensor with a box that has different bytes on two ranks.
    """
    added = added_up(row[1:] for report in reports for row in report.rows)
    if added.torn:
        raise CorruptionError(
            f"{min(added.torn)}: learner ranks hold different bytes of it, though they must hold the same"
        )
    return {name: add(sum_) for name, sum_ in added.checksums.items() if added.is_complete(name, shapes[name])}


def largest_change(changes: Iterable[Mapping[str, tuple[float, float]]]) -> tuple[float, str] | None:
    """The largest relative error of a quantized tensor, in Frobenius norms, and its name; None if none is quantized.

    ``changes`` are squared norms of boxes and of what quantizing changed in them (`ChecksumReport.changes`).
    """
    sums: dict[str, tuple[float, float]] = {}
    for one in changes:
        for name, (squares, errors) in one.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + squares, before[1] + errors
    found = (((errors / squares) ** 0.5 if squares else 0.0, name) for name, (squares, errors) in sums.items())
    return max(found, default=None)


def added_up(rows: Iterable[Read]) -> TensorChecksums:
    """Adds up the checksums of boxes, by tensor."""
    boxes: dict[tuple[str, Box], int] = {}
    torn = {hf for hf, box, sum_ in rows if boxes.setdefault((hf, box), sum_) != sum_}
    checksums, elements = dict[str, int](), dict[str, int]()
    volumes = {box: volume(box) for _, box in boxes}  # the few different boxes
    for (hf, box), sum_ in boxes.items():
        checksums[hf] = checksums.get(hf, 0) + sum_
        elements[hf] = elements.get(hf, 0) + volumes[box]
    return TensorChecksums(checksums=checksums, elements=elements, torn=torn)
