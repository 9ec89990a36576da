"""What engine ranks hold, however they stack and cut it, compared with what the learner sealed.

A worker answers with a checksum of every box that its loader filled (`checksums_of`); the controller adds them up over
the ranks (`compare`). Some kernels want a layout of their own, made of a parameter behind the loader: there no box is
what was loaded. Such parameters are told from corrupted ones at a server's first load, where all layers and experts of
a private one differ and the probe vouches for them; from then on the list stands.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.checksums import add, aligned, checksum
from rl_megatron.weights.layout import Box, Layout, Shape
from rl_megatron.weights.recorded import Held

Row = tuple[str, str, Box, int]
"""Parameter, Hugging Face tensor, its box, the checksum of what lies there."""


Read = tuple[str, Box, int]
"""Hugging Face tensor, its box, the checksum of what came in for it."""


Kinds = Mapping[str, frozenset[str]]
"""By server, kinds of parameters (`kind_of`) that its kernels keep in layouts of their own."""
NO_KINDS: Kinds = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank holds, and how long it did nothing but compute checksums.

    ``read`` is what a rank found in a file or was sent, before its kernels made something else of it.
    """

    rows: Sequence[Row]
    seconds: float
    read: Sequence[Read] = ()

    def to_json(self) -> dict[str, object]:
        """For an answer over HTTP."""
        return {"rows": [list(row) for row in self.rows], "seconds": self.seconds, "read": list(self.read)}

    @classmethod
    def from_json(cls, said: Mapping[str, object]) -> Report:
        """Inverse of `to_json`."""
        rows, seconds, read = said["rows"], said["seconds"], said["read"]
        assert isinstance(rows, list)
        assert isinstance(seconds, int | float)
        assert isinstance(read, list)
        return cls(
            rows=[(param, hf, tuple((low, high) for low, high in box), int(sum_)) for param, hf, box, sum_ in rows],
            seconds=seconds,
            read=[(hf, tuple((low, high) for low, high in box), int(sum_)) for hf, box, sum_ in read],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """``place`` of a learner's ``param`` is ``box`` of Hugging Face tensor ``hf``, whose shape is ``whole``."""

    param: str
    place: Box
    hf: str
    box: Box
    whole: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hugging Face tensors by name: those that differ, with the parameters they lie in; and those unseen."""

    differing: Mapping[str, frozenset[str]]
    unseen: frozenset[str]

    def private(self, reports: Sequence[Report]) -> frozenset[str]:
        """Kinds of parameters that hold several tensors, over all layers and experts, all of which differ."""
        wrong = {(param, hf) for hf, params in self.differing.items() for param in params}
        same = {kind_of(param) for report in reports for param, hf, _, _ in report.rows if (param, hf) not in wrong}
        return frozenset(kind for kind, n in Counter(kind_of(p) for p, _ in wrong).items() if n > 1) - same


def kind_of(param: str) -> str:
    """A parameter's name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", param)


class Beside:
    """Checksums that a thread of its own computes, while tensors go on coming in. Nobody may write what it looks at."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._held: list[Future[Sequence[Row]]] = []
        self._read: list[Future[Read]] = []

    def read(self, name: str, tensor: Tensor) -> None:
        """Look at a whole tensor, as it was found."""
        self._read_box(name, tensor, tuple(tensor.shape), tuple((0, size) for size in tensor.shape))

    def sent(self, one: Held, tensor: Tensor) -> None:
        """Look at a box that was sent, in a parameter that kernels make something else of."""
        if whole_words(one, tensor.dtype.itemsize):
            self._read_box(one.hf, one.of(tensor), one.whole, one.box)

    def held(self, held: Sequence[Held], params: Mapping[str, Tensor]) -> None:
        """Look at boxes as they are held."""
        ready = _ready(params[held[0].param]) if held else None

        def look() -> Sequence[Row]:
            _wait_for(ready)
            return checksums_of(held, params).rows

        self._held.append(self._thread.submit(look))

    def report(self) -> Report:
        """What was seen; ``seconds`` is how long this waited for it."""
        started = time.perf_counter()
        rows = [row for future in self._held for row in future.result()]
        read = [future.result() for future in self._read]
        self._thread.shutdown()
        return Report(rows=rows, seconds=time.perf_counter() - started, read=read)

    def _read_box(self, name: str, tensor: Tensor, whole: Shape, box: Box) -> None:
        ready = _ready(tensor)

        def look() -> Read:
            _wait_for(ready)
            return name, box, checksum(tensor, whole, tuple(low for low, _ in box))

        self._read.append(self._thread.submit(look))


def _ready(tensor: Tensor) -> torch.cuda.Event | None:
    """On a GPU, when what this thread has asked for so far is done: another thread's stream does not wait for it."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _wait_for(ready: torch.cuda.Event | None) -> None:
    if ready is not None:
        ready.synchronize()


def waited(reports: Mapping[str, Sequence[Report]]) -> float:
    """Seconds by which checksums kept the slowest server: its ranks compute them at the same time."""
    return max((report.seconds for said in reports.values() for report in said), default=0.0)


def seen(held: Sequence[Held], private: Collection[str]) -> list[Held]:
    """Those that do not lie in parameters of ``private`` kinds."""
    return [one for one in held if kind_of(one.param) not in private]


def checksums_of(held: Sequence[Held], params: Mapping[str, Tensor]) -> Report:
    """Of every box whose parameter is in ``params`` and large enough to hold it."""
    started, rows = time.perf_counter(), []
    for one in held:
        tensor = params.get(one.param)
        if tensor is not None and fits(one, tensor) and whole_words(one, tensor.dtype.itemsize):
            sum_ = checksum(one.of(tensor), one.whole, tuple(low for low, _ in one.box))
            rows.append((one.param, one.hf, one.box, sum_))
    return Report(rows=rows, seconds=time.perf_counter() - started)


def sources_of(layout: Layout, hf: Layout) -> list[list[Source]]:
    """The boxes that each learner rank answers for: those of which it is the first holder."""
    shapes: Mapping[str, Shape] = hf.local_shapes(0)
    out: list[list[Source]] = [[] for _ in range(layout.dims.world_size)]
    for spec in layout.rows():
        for chunk, slices in enumerate(layout.chunks(spec)):
            for layer, stages in layout.layer_stages(spec).items():
                for expert in range(layout.shape.num_experts if "{expert}" in spec.name else 1):
                    ep = layout.expert_rank(spec, expert)
                    rank = min(r for stage in stages for r in layout.ranks(spec, chunk, stage, ep))
                    param = spec.name.format(layer=layer, expert=expert)
                    names = [one.hf.format(layer=layer, expert=expert) for one in slices]
                    out[rank] += [
                        Source(param=param, place=one.box, hf=name, box=one.hf_box, whole=shapes[name])
                        for name, one in zip(names, slices, strict=True)
                    ]
    return out


def sent_checksums(
    sources: Sequence[Source], tensors: Mapping[str, Tensor], dtype_of: Callable[[str], torch.dtype]
) -> Report:
    """Of the learner's boxes, in the dtype in which the engines get each tensor."""
    started, rows = time.perf_counter(), []
    for one in sources:
        dtype = dtype_of(one.hf)
        if add_up([one], dtype.itemsize):
            box = tensors[one.param].detach()[tuple(slice(low, high) for low, high in one.place)].to(dtype)
            rows.append((one.param, one.hf, one.box, checksum(box, one.whole, tuple(low for low, _ in one.box))))
    return Report(rows=rows, seconds=time.perf_counter() - started)


def add_up(sources: Sequence[Source], itemsize: int) -> bool:
    """Whether all boxes are of whole words, so that the checksums of their tensors are known from theirs."""
    return all(len(one.whole) < 2 or aligned(one.whole, one.box[1], itemsize) for one in sources)


def fits(one: Held, tensor: Tensor) -> bool:
    """Whether the box lies inside the parameter's memory."""
    size, strides, offset = one.view
    last = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return last < tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


def whole_words(one: Held, itemsize: int) -> bool:
    """Whether the box's columns are whole words, so that checksums of its tensor's boxes add up."""
    return len(one.whole) < 2 or aligned(one.whole, one.box[1], itemsize)


def sealed_by(reports: Sequence[Report], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Checksums of whole tensors from what the learner's ranks say of their boxes.

    Raises CorruptionError naming a tensor that two of them hold otherwise.
    """
    out = {}
    for name, held in _by_tensor(row[1:] for report in reports for row in report.rows).items():
        if any(len(sums) > 1 for sums in held.values()):
            raise CorruptionError(f"{name}: ranks of the learner that should hold the same hold different bytes of it")
        if _is_whole(held, shapes[name]):
            out[name] = add(*(min(sums) for sums in held.values()))
    return out


def compare(
    sealed: Mapping[str, int], shapes: Mapping[str, Shape], reports: Sequence[Report], private: frozenset[str]
) -> Comparison:
    """What the ranks of one server hold beside the sealed checksums; parameters of ``private`` kinds say nothing.

    A box that several hold, as replicated norms and heads, must be the same everywhere, and counts once. What came in
    otherwise than it was sealed differs, however it is held.
    """
    visible = [replace(one, rows=[row for row in one.rows if kind_of(row[0]) not in private]) for one in reports]
    boxes = _by_tensor(row[1:] for report in visible for row in report.rows)
    read = _by_tensor(row for report in reports for row in report.read)
    differing, unseen = {}, set()
    for name, shape in shapes.items():
        held, came = boxes.get(name, {}), read.get(name, {})
        if name in sealed and _is_whole(came, shape) and _differ(came, sealed[name]):
            differing[name] = frozenset[str]()
        elif name not in sealed or not _is_whole(held, shape):
            unseen.add(name)
        elif _differ(held, sealed[name]):
            differing[name] = frozenset(param for report in visible for param, hf, _, _ in report.rows if hf == name)
    return Comparison(differing=differing, unseen=frozenset(unseen))


def _by_tensor(rows: Iterable[Read]) -> dict[str, dict[Box, set[int]]]:
    boxes: dict[str, dict[Box, set[int]]] = {}
    for hf, box, sum_ in rows:
        boxes.setdefault(hf, {}).setdefault(box, set()).add(sum_)
    return boxes


def _differ(boxes: Mapping[Box, set[int]], sealed: int) -> bool:
    """Whether somebody holds one of them otherwise than another, or all make another tensor."""
    return any(len(sums) > 1 for sums in boxes.values()) or add(*(min(sums) for sums in boxes.values())) != sealed


def _is_whole(boxes: Iterable[Box], shape: Shape) -> bool:
    return sum(prod(high - low for low, high in box) for box in boxes) == prod(shape)
