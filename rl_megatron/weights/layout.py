"""Where every row of every Hugging Face tensor lives: plain integers, no torch.

Hugging Face names and shapes are the hub. A `Layout` is one table (a row per parameter), one model and one set of
parallel degrees; it says which box of which HF tensor a rank holds and where that box sits in the rank's local tensor.
A checkpoint on disk, the learner's ranks and the engines are all layouts; `plan.py` moves weights between any two.
Local names carry **global** layer and expert numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims

Box = tuple[tuple[int, int], ...]  # half-open (start, stop) of each tensor dim
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows [start, stop), along the cut dim, of the HF tensor ``hf``; None is padding that no HF tensor holds."""

    hf: str | None
    start: int
    stop: int


Band = tuple[Piece, ...]


def _always(_shape: ModelShape, _dims: ParallelDims) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One row of a table. A local tensor is, along ``dim``, one equal chunk of every band, in order.

    ``{layer}`` and ``{expert}`` in ``name`` place the parameter on a pipeline stage and an expert rank and appear in
    its pieces' names as well. ``axis=None`` is whole on every rank of its stage; ``padded`` fills the last band up to
    a multiple of ``Layout.vocab_multiple`` times the axis' degree. ``others`` are the sizes of the uncut dims.
    """

    name: str
    bands: Callable[[ModelShape], tuple[Band, ...]]
    others: Callable[[ModelShape], Shape]
    dim: int = 0
    axis: Literal["tp", "etp"] | None = None
    stage: Literal["first", "last"] | None = None
    padded: bool = False
    exists: Callable[[ModelShape, ParallelDims], bool] = _always


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """``hf_box`` of HF tensor ``hf`` sits at ``box`` of local tensor ``param``, whose whole shape is ``shape``."""

    hf: str
    hf_box: Box
    param: str
    shape: Shape
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on the axes that cut weights."""

    tp: int
    pp: int
    ep: int
    etp: int


def coordinates(dims: ParallelDims, rank: int) -> Coordinates:
    """Place of a global rank: megatron-core's order ``tp-cp-ep-dp-pp``, experts being ``etp-ep-(rest)`` in a stage."""
    stage, inner = divmod(rank, dims.tp * dims.cp * dims.dp)
    return Coordinates(tp=inner % dims.tp, pp=stage, ep=inner // dims.etp % dims.ep, etp=inner % dims.etp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``table`` laid out over ``dims``. Raises ConfigError naming every size that a degree does not divide."""

    table: Sequence[ParamSpec]
    shape: ModelShape
    dims: ParallelDims = field(default_factory=ParallelDims)
    vocab_multiple: int = 8

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("\n".join(problems))

    def slices(self, rank: int) -> Iterator[Slice]:
        """Every HF box that ``rank`` holds, in table order."""
        at = coordinates(self.dims, rank)
        for spec in self._rows():
            yield from self._slices(spec, at)

    def holdings(self) -> Iterator[tuple[Slice, tuple[int, ...]]]:
        """Every distinct slice of the layout with all ranks, ascending, that hold it."""
        places = [coordinates(self.dims, rank) for rank in range(self.dims.world_size)]
        for spec in self._rows():
            holders: dict[tuple[int, int, int], list[int]] = {}
            for rank, at in enumerate(places):
                key = (at.pp, self._chunk(spec, at), at.ep if "{expert}" in spec.name else 0)
                holders.setdefault(key, []).append(rank)
            for ranks in holders.values():
                for piece in self._slices(spec, places[ranks[0]]):
                    yield piece, tuple(ranks)

    def local_shapes(self, rank: int) -> dict[str, Shape]:
        """Name and shape of every parameter that ``rank`` holds, in table order, padding counted."""
        at = coordinates(self.dims, rank)
        return {
            spec.name.format(layer=layer, expert=expert): self._local_shape(spec)
            for spec in self._rows()
            for layer, expert in self._numbers(spec, at)
        }

    def _rows(self) -> Iterator[ParamSpec]:
        return (spec for spec in self.table if spec.exists(self.shape, self.dims))

    def _degree(self, spec: ParamSpec) -> int:
        return 1 if spec.axis is None else int(getattr(self.dims, spec.axis))

    def _chunk(self, spec: ParamSpec, at: Coordinates) -> int:
        return 0 if spec.axis is None else int(getattr(at, spec.axis))

    def _bands(self, spec: ParamSpec) -> tuple[Band, ...]:
        bands = spec.bands(self.shape)
        if not spec.padded:
            return bands
        padding = -_rows_of(bands[-1]) % (self.vocab_multiple * self._degree(spec))
        return (*bands[:-1], (*bands[-1], Piece(hf=None, start=0, stop=padding)))

    def _local_shape(self, spec: ParamSpec) -> Shape:
        others = spec.others(self.shape)
        rows = sum(_rows_of(band) for band in self._bands(spec)) // self._degree(spec)
        return (*others[: spec.dim], rows, *others[spec.dim :])

    def _numbers(self, spec: ParamSpec, at: Coordinates) -> list[tuple[int, int]]:
        """(layer, expert) of each parameter that the row stands for at ``at``; 0 where the row has no such number."""
        stage = {None: at.pp, "first": 0, "last": self.dims.pp - 1}[spec.stage]
        if stage != at.pp:
            return []
        layers: Sequence[int] = range(1)
        experts = range(1)
        if "{layer}" in spec.name:
            layers = self._layers(at.pp)
        if "{expert}" in spec.name:
            count = self.shape.num_experts // self.dims.ep
            experts = range(at.ep * count, (at.ep + 1) * count)
        return [(layer, expert) for layer in layers for expert in experts]

    def _layers(self, stage: int) -> list[int]:
        """Layers of a stage: chunk ``v`` of stage ``s`` holds the block ``v * pp + s`` of consecutive layers."""
        count = self.shape.num_layers // (self.dims.pp * self.dims.vpp)
        starts = [(v * self.dims.pp + stage) * count for v in range(self.dims.vpp)]
        return [layer for start in starts for layer in range(start, start + count)]

    def _slices(self, spec: ParamSpec, at: Coordinates) -> Iterator[Slice]:
        boxes, shape = self._boxes(spec, self._chunk(spec, at)), self._local_shape(spec)
        for layer, expert in self._numbers(spec, at):
            param = spec.name.format(layer=layer, expert=expert)
            for hf, hf_box, box in boxes:
                yield Slice(hf=hf.format(layer=layer, expert=expert), hf_box=hf_box, param=param, shape=shape, box=box)

    def _boxes(self, spec: ParamSpec, chunk: int) -> list[tuple[str, Box, Box]]:
        """(HF name pattern, HF box, local box) of each piece that reaches into the ``chunk``-th share of its band."""
        rest = tuple((0, size) for size in spec.others(self.shape))
        before, after = rest[: spec.dim], rest[spec.dim :]
        out: list[tuple[str, Box, Box]] = []
        offset = 0
        for band in self._bands(spec):
            size = _rows_of(band) // self._degree(spec)
            low, seen = chunk * size, 0
            for piece in band:
                start, stop = max(low, seen), min(low + size, seen + piece.stop - piece.start)
                if start < stop and piece.hf is not None:
                    hf_span = (piece.start + start - seen, piece.start + stop - seen)
                    span = (offset + start - low, offset + stop - low)
                    out.append((piece.hf, (*before, hf_span, *after), (*before, span, *after)))
                seen += piece.stop - piece.start
            offset += size
        return out

    def _problems(self) -> Iterator[str]:
        shape, d = self.shape, self.dims
        if d.tp * d.cp * d.dp % (d.ep * d.etp):
            yield (
                f"ep*etp = {d.ep}*{d.etp} = {d.ep * d.etp} does not divide tp*cp*dp = {d.tp}*{d.cp}*{d.dp} = "
                f"{d.tp * d.cp * d.dp}; change one of them"
            )
        if shape.num_layers % (d.pp * d.vpp):
            yield f"pp*vpp = {d.pp}*{d.vpp} = {d.pp * d.vpp} does not divide {shape.num_layers} layers; lower pp or vpp"
        if shape.num_kv_heads % d.tp:
            yield f"tp = {d.tp} does not divide {shape.num_kv_heads} key/value heads; lower tp"
        if shape.num_experts % d.ep:
            yield f"ep = {d.ep} does not divide {shape.num_experts} experts; lower ep"
        for spec in self._rows():
            for band in self._bands(spec):
                if _rows_of(band) % self._degree(spec):
                    yield (
                        f"{spec.axis} = {self._degree(spec)} does not divide dim {spec.dim} of {spec.name}, "
                        f"{_rows_of(band)}; lower {spec.axis}"
                    )


def _rows_of(band: Band) -> int:
    return sum(piece.stop - piece.start for piece in band)
