"""Reports of engine ranks: checksums of the boxes that they hold, however they stack and cut tensors.

A worker reports a checksum of every box that its loader filled (`checksums_of`); the controller adds them up over the
ranks (`compare`). Some kernels convert a parameter to a private layout after the load, where no box is what was loaded.
A server's first load tells such parameters apart from corrupted ones: a private one differs in all layers and experts,
and the probe verifies it. From then on the list is fixed.

Packs a rank's report for its way to the controller: checksums as columns, and what they are of by its digest.

A rank has the same boxes at every push, so it names them to a controller that does not know their digest alone. Engines
import this module: it needs numpy and torch alone.

Computes checksums of the learner's boxes, as engines receive them.

Adds up the checksums of boxes, which ranks report, to checksums of whole tensors.
"""

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
from math import prod
from types import MappingProxyType
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.boxes import Box, Shape, volume, whole_box
from rl_megatron.weights.checks.checksums import add, aligned, box_checksums, checksum, narrowed
from rl_megatron.weights.checks.places import Held
from rl_megatron.weights.layouts.layout import Layout

BoxSum = tuple[str, str, Box, int]
"""Parameter, Hugging Face tensor, its box, and the checksum of the parameter's memory there."""


Read = tuple[str, Box, int]
"""Hugging Face tensor, its box, and the checksum of the bytes that arrived."""


Kinds = Mapping[str, frozenset[str]]
"""By server, kinds of parameters (`kind_of`) that its kernels keep in private layouts."""
NO_KINDS: Kinds = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Checksums of what one rank holds, and the seconds that the rank waited for them.

    ``read`` are checksums of what the rank read or received, before its kernels converted it; ``window`` is the most
    bytes in which it received that, beside the parameters. ``changes`` are, of a learner's rank that quantises, squared
    Frobenius norms of its boxes and of what that changed in them, by tensor.
    """

    rows: Sequence[BoxSum]
    seconds: float
    read: Sequence[Read] = ()
    changes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    window: int = 0


def of_one_rank(reports: Sequence[Report]) -> Report:
    """A rank's reports on several models, or parts of one, as one. None has ``changes``, which are a learner's."""
    if len(reports) == 1:
        return reports[0]
    return Report(
        rows=[row for one in reports for row in one.rows],
        seconds=sum(one.seconds for one in reports),
        read=[row for one in reports for row in one.read],
        window=sum(one.window for one in reports),
    )


def kind_of(param: str) -> str:
    """A parameter's name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", param)


class Beside:
    """Computes checksums in a separate thread while more tensors arrive. Nothing may write to a tensor meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._held: list[Future[Sequence[BoxSum]]] = []
        self._read: list[Future[Read]] = []

    def read(self, name: str, tensor: Tensor) -> None:
        """Checksum a whole tensor as it was read."""
        self._read_box(name, tensor, tuple(tensor.shape), whole_box(tensor.shape))

    def sent(self, one: Held, tensor: Tensor) -> list[Future[Read]]:
        """Checksum a received box in a parameter that kernels will convert once this is done; nothing covers some."""
        if not whole_words(one, tensor.dtype.itemsize):
            return []
        return [self._read_box(one.hf, narrowed(one.of(tensor), one.dtype), one.whole, one.box)]

    def held(self, held: Sequence[Held], params: Mapping[str, Tensor]) -> None:
        """Checksum boxes in the parameters that hold them."""
        ready = _ready(params[held[0].param]) if held else None

        def look() -> Sequence[BoxSum]:
            _wait_for(ready)
            return checksums_of(held, params).rows

        self._held.append(self._thread.submit(look))

    def report(self) -> Report:
        """Wait for all checksums and report them; ``seconds`` is the time of this wait."""
        started = time.perf_counter()
        rows = [row for future in self._held for row in future.result()]
        read = [future.result() for future in self._read]
        self._thread.shutdown()
        return Report(rows=rows, seconds=time.perf_counter() - started, read=read)

    def _read_box(self, name: str, tensor: Tensor, whole: Shape, box: Box) -> Future[Read]:
        ready = _ready(tensor)

        def look() -> Read:
            _wait_for(ready)
            return name, box, checksum(tensor, whole, tuple(low for low, _ in box))

        self._read.append(future := self._thread.submit(look))
        return future


def _ready(tensor: Tensor) -> torch.cuda.Event | None:
    """On a GPU, an event after all work that this thread has queued; another thread's stream must wait for it."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _wait_for(ready: torch.cuda.Event | None) -> None:
    if ready is not None:
        torch.cuda.set_device(ready.device)  # a new thread has GPU 0, and the wait may open a context there
        ready.synchronize()


def seconds_waited(reports: Mapping[str, Sequence[Report]]) -> float:
    """Seconds that the slowest server waited for checksums; its ranks compute them at the same time."""
    return max((report.seconds for said in reports.values() for report in said), default=0.0)


def not_private(held: Sequence[Held], private: Collection[str]) -> list[Held]:
    """The boxes that are not in parameters of ``private`` kinds."""
    return [one for one in held if kind_of(one.param) not in private]


def checksums_of(held: Sequence[Held], params: Mapping[str, Tensor]) -> Report:
    """Checksums of every box whose parameter is in ``params`` and large enough to hold it."""
    started = time.perf_counter()
    there = [(one, tensor) for one in held if (tensor := params.get(one.param)) is not None]
    there = [(one, t) for one, t in there if fits(one, t) and whole_words(one, t.dtype.itemsize)]
    sums = box_checksums(
        (narrowed(one.of(t), one.dtype), one.whole, tuple(low for low, _ in one.box)) for one, t in there
    )
    rows = [(one.param, one.hf, one.box, found) for (one, _), found in zip(there, sums, strict=True)]
    return Report(rows=rows, seconds=time.perf_counter() - started)


def fits(one: Held, tensor: Tensor) -> bool:
    """Whether the box lies inside the parameter's memory."""
    size, strides, offset = one.view
    last = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return last < tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


def whole_words(one: Held, itemsize: int) -> bool:
    """Whether the box's columns are whole words, `narrowed`, so that checksums of its tensor's boxes add up."""
    return len(one.whole) < 2 or aligned(one.whole, one.box[1], min(itemsize, one.dtype.itemsize))


REPORT_FORM = "2"
"""A trainer takes what servers report in this form alone."""

ReportColumn = Literal["rows", "read"]
PlacedBox = tuple[str, str, Box] | tuple[str, Box]
"""A row of a `Report` without its checksum."""


def packed_report(report: Report, known: Collection[str]) -> dict[str, object]:
    """The report as JSON. It names the boxes of a column unless their `digest_of_boxes` is ``known``; ``sums`` are
    of 64 bits, little-endian, in base64."""
    return {
        "rows": _packed("rows", report.rows, known),
        "read": _packed("read", report.read, known),
        "seconds": report.seconds,
        "window": report.window,
    }


@lru_cache(maxsize=16)  # of two columns of two models, before and after kinds are private
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
class Source:
    """``place`` of a learner's ``param`` is ``box`` of Hugging Face tensor ``hf``, whose shape is ``whole``."""

    param: str
    place: Box
    hf: str
    box: Box
    whole: Shape


def sources_of(layout: Layout, hf: Layout) -> list[list[Source]]:
    """The boxes that each learner rank checksums: those of which it is the first holder."""
    shapes: Mapping[str, Shape] = hf.local_shapes(0)
    out: list[list[Source]] = [[] for _ in range(layout.dims.world_size)]
    for spec in layout.rows():
        for chunk, slices in enumerate(layout.chunks(spec)):
            for layer, stages in layout.layer_stages(spec).items():
                for expert in range(layout.shape.num_experts if "{expert}" in spec.name else 1):
                    ep = layout.expert_rank(spec, expert)
                    rank = min(r for stage in stages for r in layout.ranks(spec, chunk, stage, ep))
                    for one in slices:
                        name, param = (n.format(layer=layer, expert=expert) for n in (one.hf, one.param))
                        whole = shapes[name]
                        out[rank].append(Source(param=param, place=one.box, hf=name, box=one.hf_box, whole=whole))
    return out


def sent_checksums(
    sources: Sequence[Source], tensors: Mapping[str, Tensor], sent: Callable[[Source, Tensor], Tensor]
) -> Report:
    """Checksums of what engines receive of the learner's boxes: ``sent`` makes it of a box's values."""
    started = time.perf_counter()
    added: list[Source] = []

    def boxes() -> Iterator[tuple[Tensor, Shape, tuple[int, ...]]]:
        for one in sources:
            box = sent(one, tensors[one.param].detach()[tuple(slice(low, high) for low, high in one.place)])
            if add_up([one], box.dtype.itemsize):
                added.append(one)
                yield box, one.whole, tuple(low for low, _ in one.box)

    sums = box_checksums(boxes())
    rows = [(one.param, one.hf, one.box, found) for one, found in zip(added, sums, strict=True)]
    return Report(rows=rows, seconds=time.perf_counter() - started)


def add_up(sources: Sequence[Source], itemsize: int) -> bool:
    """Whether all boxes are made of whole words, so that their checksums add up to those of the tensors."""
    return all(len(one.whole) < 2 or aligned(one.whole, one.box[1], itemsize) for one in sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSums:
    """Sums over the boxes of each tensor, a box that several ranks hold once: of checksums, and of elements.

    ``torn`` are tensors of which two ranks hold other bytes in one box.
    """

    checksums: Mapping[str, int]
    elements: Mapping[str, int]
    torn: Collection[str]

    def whole(self, name: str, shape: Shape) -> bool:
        """Whether the boxes, which do not overlap, fill the tensor."""
        return self.elements.get(name, 0) == prod(shape)

    def equals(self, name: str, sealed: int) -> bool:
        """Whether all ranks that hold a box of the tensor agree, and its checksum is the sealed one."""
        return name not in self.torn and add(self.checksums.get(name, 0)) == sealed


def sealed_by(reports: Sequence[Report], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Checksums of whole tensors, from the reports of the learner's ranks on their boxes.

    Raises CorruptionError that names a tensor of which two ranks hold different bytes.
    """
    added = added_up(row[1:] for report in reports for row in report.rows)
    if added.torn:
        raise CorruptionError(
            f"{min(added.torn)}: learner ranks hold different bytes of it, though they must hold the same"
        )
    return {name: add(sum_) for name, sum_ in added.checksums.items() if added.whole(name, shapes[name])}


def largest_change(changes: Iterable[Mapping[str, tuple[float, float]]]) -> tuple[float, str] | None:
    """The largest relative error of a quantised tensor, in Frobenius norms, and its name; None if none is quantised.

    ``changes`` are squared norms of boxes and of what quantising changed in them (`Report.changes`).
    """
    sums: dict[str, tuple[float, float]] = {}
    for one in changes:
        for name, (squares, errors) in one.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + squares, before[1] + errors
    found = (((errors / squares) ** 0.5 if squares else 0.0, name) for name, (squares, errors) in sums.items())
    return max(found, default=None)


def added_up(rows: Iterable[Read]) -> TensorSums:
    """Add up the checksums of boxes, by tensor."""
    boxes: dict[tuple[str, Box], int] = {}
    torn = {hf for hf, box, sum_ in rows if boxes.setdefault((hf, box), sum_) != sum_}
    checksums, elements = dict[str, int](), dict[str, int]()
    volumes = {box: volume(box) for _, box in boxes}  # of the few that differ
    for (hf, box), sum_ in boxes.items():
        checksums[hf] = checksums.get(hf, 0) + sum_
        elements[hf] = elements.get(hf, 0) + volumes[box]
    return TensorSums(checksums=checksums, elements=elements, torn=torn)
