"""One transfer of a plan, and the stretch that stands for all transfers of layers and experts that move alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_megatron.weights.boxes import Box, Shape, shift, volume
from rl_megatron.weights.layouts.layout import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy ``src_box`` of ``src_param`` on process ``src_rank`` to ``dst_box`` of ``dst_param`` on ``dst_rank``.

    The boxes have one size; the shapes are those of the whole local tensors. ``layer`` is None outside of layers.
    """

    layer: int | None
    src_rank: int
    src_param: str
    src_shape: Shape
    src_box: Box
    dst_rank: int
    dst_param: str
    dst_shape: Shape
    dst_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """``box`` of each listed layer and expert, from one of ``holders`` into each of the destinations.

    ``local`` destinations hold it themselves. The transfers into the others are in order of layer, expert and
    destination; holder i sends those from ``bounds[i]`` up to ``bounds[i + 1]``, so that each destination gets about
    the same number from it.
    """

    box: Box
    wanted: Slice
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    holders: tuple[int, ...]  # processes, ascending
    held: tuple[Slice, ...]  # of each holder
    local: tuple[int, ...]
    remote: tuple[int, ...]  # processes, ascending
    bounds: tuple[int, ...] = ()

    @property
    def in_layers(self) -> bool:
        """Whether it belongs to layers; if not, ``layers`` is (0,)."""
        return "{layer}" in self.wanted.param

    @property
    def count(self) -> int:
        """Number of transfers into one destination."""
        return len(self.layers) * len(self.experts)

    @property
    def size(self) -> int:
        """Number of elements of one transfer."""
        return volume(self.box)

    def into(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` receives, including those from itself."""
        if process in self.local:
            yield from self._write(bisect_left(self.holders, process), process, range(self.count))
        at = index_of(self.remote, process)
        if at is not None:
            for i in range(len(self.holders)):
                yield from self._write(i, process, self._span(i, at))

    def out_of(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` sends to others."""
        i = index_of(self.holders, process)
        if i is not None:
            for at, receiver in enumerate(self.remote):
                yield from self._write(i, receiver, self._span(i, at))

    def flows(self) -> Iterator[tuple[int, int, int]]:
        """(sender, receiver, elements) of each pair of different processes with transfers."""
        size, width = self.size, len(self.remote)
        for i, sender in enumerate(self.holders if self.remote else ()):
            each, more = divmod(self.bounds[i + 1] - self.bounds[i], width)
            for k in range(width if each else more):
                yield sender, self.remote[(self.bounds[i] + k) % width], (each + (k < more)) * size

    def handed_on(self, to: Mapping[int, int]) -> Iterator[Stretch]:
        """The stretch into process ``to[p]`` instead of each destination p, which sends what it holds itself."""
        for process in self.local:
            i = bisect_left(self.holders, process)
            yield replace(
                self,
                holders=(process,),
                held=(self.held[i],),
                local=(),
                remote=(to[process],),
                bounds=(0, self.count),
            )
        if self.remote:
            yield replace(self, local=(), remote=tuple(sorted(to[process] for process in self.remote)))

    def _span(self, i: int, at: int) -> range:
        """The transfers into the ``at``-th destination that holder i sends."""
        width = len(self.remote)
        return range(-((at - self.bounds[i]) // width), -((at - self.bounds[i + 1]) // width))

    def _write(self, i: int, process: int, span: range) -> Iterator[Transfer]:
        if not span:
            return
        held, wanted = self.held[i], self.wanted
        src_box, dst_box = shift(self.box, held.hf_box, held.box), shift(self.box, wanted.hf_box, wanted.box)
        for k in span:
            layer, expert = self.layers[k // len(self.experts)], self.experts[k % len(self.experts)]
            yield Transfer(
                layer=layer if self.in_layers else None,
                src_rank=self.holders[i],
                src_param=held.param.format(layer=layer, expert=expert),
                src_shape=held.shape,
                src_box=src_box,
                dst_rank=process,
                dst_param=wanted.param.format(layer=layer, expert=expert),
                dst_shape=wanted.shape,
                dst_box=dst_box,
            )


def index_of(ascending: Sequence[int], process: int) -> int | None:
    """The index of a process among others; None if it is not among them."""
    i = bisect_left(ascending, process)
    return i if i < len(ascending) and ascending[i] == process else None
