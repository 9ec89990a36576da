"""Reports of engine ranks: checksums of the boxes that they hold, however they stack and cut tensors.

A worker reports a checksum of every box that its loader filled (`checksums_of`); the controller adds them up over the
ranks (`compare`). Some kernels convert a parameter to a private layout after the load, where no box is what was loaded.
A server's first load tells such parameters apart from corrupted ones: a private one differs in all layers and experts,
and the probe verifies it. From then on the list is fixed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from rl_megatron.weights.boxes import Box, Shape, whole_box
from rl_megatron.weights.checks.checksums import aligned, box_checksums, checksum, narrowed
from rl_megatron.weights.checks.places import Held

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
