"""Measures how fast this rank computes: seconds of its passes, and of a probe, a fixed matrix product.

A collective makes all its ranks as late as the slowest, inside layers too, so seconds of passes say which rank is slow
only where no other rank holds it up. The probe runs on the rank's own device, between collectives, and is equal on all
ranks whatever their layout, layers and sequences. One before each micro-batch sees the device as it is under load, and
seconds in which the rank was held up count as often as they occur. docs/adr/0012 says what it cannot see.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["passes", "probe"]
_Moment = float | torch.cuda.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds that a rank spent in forward and backward passes, and in ``probes`` equal probes of its speed; bytes that
    it has held at most since its start: of its GPU as torch's allocator has them, or of a CPU's resident memory."""

    passes: float
    probing: float
    probes: int
    peak: int


class _Meter:
    """Times what this rank does. On a GPU events in the stream take the time, so nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size, dtype, self._products = (128, torch.float32, 8) if device.type == "cpu" else (2048, torch.bfloat16, 16)
        self._factor = torch.ones(size, size, dtype=dtype, device=device)
        self._product = torch.empty_like(self._factor)
        self._timed: list[tuple[Kind, _Moment, _Moment]] = []
        self._multiply()  # the first call loads the library's kernels

    def _multiply(self) -> None:
        for _ in range(self._products):
            torch.mm(self._factor, self._factor, out=self._product)

    def probe(self) -> None:
        with self.timed("probe"), torch.no_grad():
            self._multiply()

    @contextlib.contextmanager
    def timed(self, kind: Kind) -> Iterator[None]:
        begin = self._now()
        yield
        self._timed.append((kind, begin, self._now()))

    def _now(self) -> _Moment:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def taken(self) -> Spent | None:
        ended: dict[Kind, list[float]] = {"passes": [], "probe": []}
        for kind, begin, end in (timed := self._timed):
            seconds = _between(begin, end)
            if seconds is None:
                break  # the device makes them in this order
            ended[kind].append(seconds)
        passes, probes = ended["passes"], ended["probe"]
        self._timed = timed[len(passes) + len(probes) :]
        if not timed[: len(passes) + len(probes)]:
            return None
        return Spent(passes=sum(passes), probing=sum(probes), probes=len(probes), peak=self._peak())

    def _peak(self) -> int:
        if self._device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.cuda.max_memory_reserved(self._device))


_meter: _Meter | None = None


def begin(device: torch.device) -> None:
    """Measure from here on."""
    global _meter
    _meter = _Meter(device)


def probe() -> None:
    """Make one probe, if this process measures."""
    if _meter is not None:
        _meter.probe()


def timed() -> contextlib.AbstractContextManager[None]:
    """Count the time inside as passes, if this process measures."""
    return contextlib.nullcontext() if _meter is None else _meter.timed("passes")


def taken() -> Spent | None:
    """What was spent since the last call and has ended on the device; None if nothing was."""
    return None if _meter is None else _meter.taken()


def _between(begin: _Moment, end: _Moment) -> float | None:
    """Seconds between two moments; None if the second is still to come."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1e3 if end.query() else None
