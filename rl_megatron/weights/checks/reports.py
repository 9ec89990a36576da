"""What engine ranks hold, however they stack and cut it, compared with what the learner sealed.

A worker answers with a checksum of every box that its loader filled (`checksums_of`); the controller adds them up over
the ranks (`compare`). Some kernels want a layout of their own, made of a parameter behind the loader: there no box is
what was loaded. A server's first load tells such parameters from corrupted ones: all layers and experts of a private
one differ, and the probe verifies them; from then on the list is fixed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.checks.checksums import aligned, checksum
from rl_megatron.weights.checks.places import Held

BoxSum = tuple[str, str, Box, int]
"""Parameter, Hugging Face tensor, its box, the checksum of what lies there."""


Read = tuple[str, Box, int]
"""Hugging Face tensor, its box, the checksum of what arrived for it."""


Kinds = Mapping[str, frozenset[str]]
"""By server, kinds of parameters (`kind_of`) that its kernels keep in layouts of their own."""
NO_KINDS: Kinds = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank holds, and how long it did nothing but compute checksums.

    ``read`` is what a rank found in a file or was sent, before its kernels made something else of it.
    """

    rows: Sequence[BoxSum]
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


def kind_of(param: str) -> str:
    """A parameter's name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", param)


class Beside:
    """Checksums that a thread of its own computes, while tensors go on coming in. Nobody may write what it looks at."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._held: list[Future[Sequence[BoxSum]]] = []
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

        def look() -> Sequence[BoxSum]:
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


def seconds_waited(reports: Mapping[str, Sequence[Report]]) -> float:
    """Seconds by which checksums kept the slowest server: its ranks compute them at the same time."""
    return max((report.seconds for said in reports.values() for report in said), default=0.0)


def not_private(held: Sequence[Held], private: Collection[str]) -> list[Held]:
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


def fits(one: Held, tensor: Tensor) -> bool:
    """Whether the box lies inside the parameter's memory."""
    size, strides, offset = one.view
    last = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return last < tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


def whole_words(one: Held, itemsize: int) -> bool:
    """Whether the box's columns are whole words, so that checksums of its tensor's boxes add up."""
    return len(one.whole) < 2 or aligned(one.whole, one.box[1], itemsize)
