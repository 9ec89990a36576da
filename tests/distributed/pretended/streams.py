"""Streams of a pretended GPU whose copies are made as late as CUDA allows: when the computing stream waits for them.

A copy reads its source then, whatever is in it by that time; memory that was freed meanwhile is others', so a copy from
there brings garbage, and one into it raises. What waits too little computes something else than without copies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.distributed.pretended.machine import refuse_another_gpus_thread
from tests.distributed.pretended.tensor import Gpu, OnGpu

_GARBAGE = 0x7F  # a byte; floats of such bytes are huge
_ALL: weakref.WeakSet[Late] = weakref.WeakSet()


class Late:
    """A stream. `COMPUTES` does at once what it is asked; others wait for it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._done = self._asked = 0
        _ALL.add(self)

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._asked += 1

    def reach(self, place: int) -> None:
        """Do everything up to ``place``."""
        while self._done < place:
            self._done += 1
            self._work.popleft()()

    def wait_event(self, event: Moment) -> None:
        if self is COMPUTES:
            event.happen()
        else:
            self.add(event.happen)

    def wait_stream(self, other: Late) -> None:
        event = Moment()
        event.record(other)
        self.wait_event(event)

    def record_event(self, event: Moment | None = None) -> Moment:
        event = event or Moment()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.reach(self._asked)


class Moment:
    """An event."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._stream, self._place = COMPUTES, 0

    def record(self, stream: Late | None = None) -> None:
        self.device = torch.device("cuda", Gpu.number)
        self._stream = stream or _CURRENT[-1]
        self._place = self._stream._asked

    def happen(self) -> None:
        self._stream.reach(self._place)

    wait = happen

    def synchronize(self) -> None:
        refuse_another_gpus_thread(self.device)
        self.happen()

    def query(self) -> bool:
        return self._stream._done >= self._place


COMPUTES = Late()
_CURRENT = [COMPUTES]


@contextlib.contextmanager
def _stream(stream: Late) -> Iterator[None]:
    _CURRENT.append(stream)
    try:
        yield
    finally:
        _CURRENT.pop()


class _Place:
    """Where a tensor of the GPU is, without keeping that memory from others."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._as = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor | None:
        """The tensor; None if its memory was freed."""
        storage, (dtype, *where) = self._storage(), self._as
        return None if storage is None else OnGpu(torch.empty(0, dtype=dtype).set_(storage, *where))


def install() -> None:
    """Put them in place of the pretended GPU's streams, of this process."""
    copy = Tensor.copy_

    def to_gpu(place: _Place, source: Tensor) -> None:
        if (target := place.tensor()) is None:
            raise RuntimeError("a copy into memory of the GPU that was freed")
        copy(target, source)

    def from_gpu(target: Tensor, place: _Place) -> None:
        source = place.tensor()
        target.view(torch.uint8).fill_(_GARBAGE) if source is None else copy(target, source)

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        stream = _CURRENT[-1]
        if not non_blocking or stream is COMPUTES or self.is_cuda == source.is_cuda:
            copy(self, source, non_blocking)
        elif self.is_cuda:
            stream.add(partial(to_gpu, _Place(self), source))
        else:
            stream.add(partial(from_gpu, self, _Place(source)))
        return self

    Tensor.copy_ = copy_
    cuda = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Late, Moment, _stream
    cuda.current_stream = cuda.default_stream = lambda *given, **named: _CURRENT[-1]
    cuda.synchronize = lambda *given, **named: [stream.synchronize() for stream in list(_ALL)]
