"""Layouts: which rank holds every row of every Hugging Face tensor. Plain integers, no torch.

Hugging Face names and shapes are the hub. A `Layout` is one table (a row per parameter), one model and one set of
parallel degrees. It maps boxes of HF tensors to ranks, and to boxes of the ranks' local tensors.
A checkpoint on disk, the learner's ranks and the engines are all layouts; `plan.py` moves weights between any two.
Local names carry **global** layer and expert numbers. A `Family` of models has a table for each kind of layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import DecoderNames, ExpertNames, ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, Shape, whole_box

Axis = Literal["tp", "etp", "ep"]
VOCAB_MULTIPLE = 8
"""The learner pads the vocabulary's rows to a multiple of this times tp."""


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Vocabulary rows of embedding and output layer: a multiple of ``VOCAB_MULTIPLE * tp``."""
    step = VOCAB_MULTIPLE * tp
    return -(-shape.vocab_size // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows [start, stop), along the cut dim, of the HF tensor ``hf``; None is padding, which no HF tensor holds."""

    hf: str | None
    start: int
    stop: int


Band = tuple[Piece, ...]


def every_layer(m: ModelShape) -> range:
    """All decoder layers."""
    return range(m.num_layers)


def one(_m: ModelShape) -> int:
    """A unit of one row: rows may be cut anywhere."""
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One row of a table. A local tensor concatenates, along ``dim``, one equal chunk of every band, in order.

    ``{layer}`` and ``{expert}`` in ``name`` place the parameter on a pipeline stage and an expert rank and appear in
    its pieces' names as well. ``axis=None`` is whole on every rank of its stage; ``padded`` pads the last band to a
    multiple of ``Layout.vocab_multiple`` times the axis' degree. ``bands`` gets the axis' degree too (engines repeat
    heads when there are more ranks than heads); ``unit`` rows of a band (a head's) stay on one rank. ``other_axes`` are
    the sizes of the uncut dims, ``layers`` the layers that have the parameter. ``frozen`` marks what is held and never
    trained, ``keeps_dtype`` buffers that stay float32 when the weights are cast. The only layer of a row that is
    ``is_first_only`` has no number in its name.
    """

    name: str
    bands: Callable[[ModelShape, int], tuple[Band, ...]]
    other_axes: Callable[[ModelShape], Shape]
    dim: int = 0
    axis: Axis | None = None
    stage: Literal["first", "last"] | None = None
    padded: bool = False
    unit: Callable[[ModelShape], int] = one
    layers: Callable[[ModelShape], Sequence[int]] = every_layer
    condition: Callable[[ModelShape, ParallelDims], bool] = lambda shape, dims: True
    frozen: bool = False
    keeps_dtype: bool = False
    is_first_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """``hf_box`` of HF tensor ``hf`` is ``box`` of local tensor ``param``, which has the whole shape ``shape``.

    Both names are patterns: one slice stands for every ``{layer}`` and ``{expert}`` of its row.
    """

    hf: str
    hf_box: Box
    param: str
    shape: Shape
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's coordinates on the axes that cut weights."""

    tp: int
    pp: int
    ep: int
    etp: int

    def index_on(self, axis: Axis | None) -> int:
        """This rank's chunk of a row that ``axis`` cuts."""
        return 0 if axis is None else {"tp": self.tp, "etp": self.etp, "ep": self.ep}[axis]


def degree(dims: ParallelDims, axis: Axis | None) -> int:
    """The number of chunks into which ``axis`` cuts a row."""
    return 1 if axis is None else {"tp": dims.tp, "etp": dims.etp, "ep": dims.ep}[axis]


def coordinates(dims: ParallelDims, rank: int) -> Coordinates:
    """Coordinates of a global rank, in megatron-core's order ``tp-cp-ep-dp-pp``; experts: ``etp-ep-(rest)`` a stage."""
    stage, inner = divmod(rank, dims.tp * dims.cp * dims.dp)
    return Coordinates(tp=inner % dims.tp, pp=stage, ep=inner // dims.etp % dims.ep, etp=inner % dims.etp)


@lru_cache(maxsize=64)
def _places(dims: ParallelDims, axis: Axis | None, by_expert: bool) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """(chunk, ep) -> the ranks of stage 0 that hold it; ep is 0 for a row without experts."""
    out: dict[tuple[int, int], list[int]] = {}
    for rank in range(dims.tp * dims.cp * dims.dp):
        at = coordinates(dims, rank)
        out.setdefault((at.index_on(axis), at.ep if by_expert else 0), []).append(rank)
    return {key: tuple(ranks) for key, ranks in out.items()}


@lru_cache(maxsize=256)
def _layers_of_stages(sizes: tuple[int, ...], pp: int, drafted: range) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage: a chunk, of ``sizes``, of every stage in turn; ``drafted`` are on the last."""
    ends = list(itertools.accumulate(sizes))
    out = [[n for i in range(stage, len(sizes), pp) for n in range(ends[i] - sizes[i], ends[i])] for stage in range(pp)]
    out[-1] += drafted
    return tuple(map(tuple, out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``table`` laid out over ``dims``. Raises ConfigError that names every size that a degree does not divide.

    ``stages`` are the numbers of layers of each pipeline stage if they differ, in the order of the model. With ``vpp``
    they are of each chunk of a stage: the first chunks of all stages, then the second ones, and so on.
    """

    table: Sequence[ParamSpec]
    shape: ModelShape
    dims: ParallelDims = field(default_factory=ParallelDims)
    vocab_multiple: int = VOCAB_MULTIPLE
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("\n".join(problems))

    def rows(self) -> list[ParamSpec]:
        """The rows of the table that this model and mesh have."""
        return [spec for spec in self.table if spec.condition(self.shape, self.dims)]

    def chunks(self, spec: ParamSpec) -> list[list[Slice]]:
        """The slices of each chunk, in the order of ``spec.axis``, without padding."""
        return [self._slices(spec, chunk) for chunk in range(self._degree(spec))]

    def first_chunk(self, spec: ParamSpec) -> list[Slice]:
        """The first of `chunks`, alone: all have its shape."""
        return self._slices(spec, 0)

    def layer_stages(self, spec: ParamSpec) -> dict[int, tuple[int, ...]]:
        """The stages that hold each layer of the row; layer 0 stands for a row without layers."""
        if "{layer}" not in spec.name and not spec.is_first_only:
            return {0: {None: tuple(range(self.dims.pp)), "first": (0,), "last": (self.dims.pp - 1,)}[spec.stage]}
        layers = spec.layers(self.shape)
        chunks = self.dims.pp * self.dims.vpp
        sizes = self.stages if self.stages is not None else (self.shape.num_layers // chunks,) * chunks
        held = _layers_of_stages(sizes, self.dims.pp, self.shape.drafted)
        return {layer: (stage,) for stage, of in enumerate(held) for layer in of if layer in layers}

    def expert_rank(self, spec: ParamSpec, expert: int) -> int:
        """An expert's coordinate on the ``ep`` axis; 0 for a row without experts."""
        return expert * self.dims.ep // self.shape.num_experts if "{expert}" in spec.name else 0

    def ranks(self, spec: ParamSpec, chunk: int, stage: int, ep: int) -> list[int]:
        """Every rank, ascending, that holds ``chunk`` of the row's layers of ``stage`` and experts of ``ep``."""
        first = stage * self.dims.tp * self.dims.cp * self.dims.dp
        return [first + rank for rank in _places(self.dims, spec.axis, "{expert}" in spec.name)[chunk, ep]]

    def local_shapes(self, rank: int) -> dict[str, Shape]:
        """Name and shape of every parameter that ``rank`` holds, in table order, padding included."""
        at = coordinates(self.dims, rank)
        return {
            spec.name.format(layer=layer, expert=expert): shape
            for spec, shape in [(spec, self._local_shape(spec)) for spec in self.rows()]
            for layer, stages in sorted(self.layer_stages(spec).items())
            if at.pp in stages
            for expert in self._experts(spec, at.ep)
        }

    def num_parameters(self, rank: int) -> int:
        """The length of `local_shapes`, without computing it."""
        at = coordinates(self.dims, rank)
        return sum(
            sum(at.pp in stages for stages in self.layer_stages(spec).values()) * len(self._experts(spec, at.ep))
            for spec in self.rows()
        )

    def _degree(self, spec: ParamSpec) -> int:
        return degree(self.dims, spec.axis)

    def _bands(self, spec: ParamSpec) -> tuple[Band, ...]:
        bands = spec.bands(self.shape, self._degree(spec))
        if not spec.padded:
            return bands
        padding = -_rows_of(bands[-1]) % (self.vocab_multiple * self._degree(spec))
        return (*bands[:-1], (*bands[-1], Piece(hf=None, start=0, stop=padding)))

    def _local_shape(self, spec: ParamSpec) -> Shape:
        others = spec.other_axes(self.shape)
        rows = sum(_rows_of(band) for band in self._bands(spec)) // self._degree(spec)
        return (*others[: spec.dim], rows, *others[spec.dim :])

    def _slices(self, spec: ParamSpec, chunk: int) -> list[Slice]:
        shape = self._local_shape(spec)
        return [
            Slice(hf=hf, hf_box=hf_box, param=spec.name, shape=shape, box=box)
            for hf, hf_box, box in self._boxes(spec, chunk)
        ]

    def _experts(self, spec: ParamSpec, ep: int) -> range:
        if "{expert}" not in spec.name:
            return range(1)
        count = self.shape.num_experts // self.dims.ep
        return range(ep * count, (ep + 1) * count)

    def _boxes(self, spec: ParamSpec, chunk: int) -> list[tuple[str, Box, Box]]:
        """(HF name pattern, HF box, local box) of each piece that overlaps the ``chunk``-th share of its band."""
        rest = whole_box(spec.other_axes(self.shape))
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
        yield from self._stage_problems()
        if d.ep > 1 and not shape.num_experts:
            yield f"ep = {d.ep}: the model has no experts; use ep=1"
        if shape.num_experts % d.ep:
            yield f"ep = {d.ep} does not divide {shape.num_experts} experts; lower ep"
        for spec in self.rows():
            unit, chunks = spec.unit(shape), self._degree(spec)
            for band in self._bands(spec):
                if _rows_of(band) % (unit * chunks):
                    size = f"{_rows_of(band)}" + (f" in heads of {unit}" if unit > 1 else "")
                    yield (
                        f"{spec.axis} = {chunks} does not divide dim {spec.dim} of {spec.name}, {size}; "
                        f"lower {spec.axis}"
                    )

    def _stage_problems(self) -> Iterator[str]:
        layers, d = self.shape.num_layers, self.dims
        if self.stages is None:
            if layers % (d.pp * d.vpp):
                yield (
                    f"pp*vpp = {d.pp}*{d.vpp} = {d.pp * d.vpp} does not divide {layers} layers; "
                    "lower pp or vpp, or give the layers of each stage (learner.stage_layers; stages in a layout)"
                )
        elif len(self.stages) != d.pp * d.vpp or sum(self.stages) != layers:
            yield (
                f"stages={self.stages} are {len(self.stages)} numbers of {sum(self.stages)} layers, but "
                f"the layout has pp*vpp = {d.pp}*{d.vpp} = {d.pp * d.vpp} and {layers} layers"
            )
        elif min(self.stages) < 1:
            yield f"stages={self.stages}: each must be positive"


def keeping_dtype(layout: Layout) -> set[str]:
    """Names of tensors that a conversion of dtypes leaves alone."""
    return set(replace(layout, table=[row for row in layout.table if row.keeps_dtype]).local_shapes(0))


def float32_in_files(hf: Layout) -> set[str]:
    """Names of tensors that are float32 in every file from which engines load: the vectors that keep their dtype.

    Engines hold these in float32. They join the only matrix that keeps its dtype, the indexer's ``weights_proj``, with
    one of the weights' dtype. If it were wider in the file, it would never have the checksum of the engine's matrix.
    """
    shapes = hf.local_shapes(0)
    return {name for name in keeping_dtype(hf) if len(shapes[name]) == 1}


def _rows_of(band: Band) -> int:
    return sum(piece.stop - piece.start for piece in band)


Reader = Callable[[dict[str, Any], Path], ModelShape]
"""Reads sizes from the keys of config.json, whose path is for errors. Raises ConfigError that names the file, the key,
its value and what is allowed, for each setting that the family's rows do not cover."""


_STACK = ".experts.gate_up_proj"  # part of the name of a tensor of all experts


def shape_as_stored(shape: ModelShape, names: Collection[str]) -> ModelShape:
    """``shape`` with experts of one tensor a layer or one by one, as tensors of these names are; of either layout."""
    stacks = [name.startswith("mtp.") for name in names if _STACK in name]  # True: a draft layer's
    return replace(
        shape,
        stacked_experts=shape.stacked_experts or not all(stacks),
        stacked_drafts=shape.stacked_drafts or any(stacks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything about a family. It is defined next to the rows, because models import no weights.

    ``model_types`` are the ``model_type``s of config.json that ``read`` takes. ``tables`` has rows for ``hf``,
    ``megatron`` and, if plans support engines with it, ``engine``. ``stacked`` has them for files with one tensor
    for all experts of a layer, as `shape_as_stored` finds them, if there are any. ``serves``: the in-process engine
    ``rollout.local`` can sample from it, because the parts of its layers are among those of `DecoderModel`. They have
    the same names, except experts', which are ``names``, and what ``decoder`` says. Raises ConfigError if a table is
    missing.
    """

    model_types: tuple[str, ...]
    read: Reader
    tables: Mapping[str, Sequence[ParamSpec]]
    stacked: Mapping[str, Sequence[ParamSpec]] | None = None
    serves: bool = False
    names: ExpertNames = field(default_factory=ExpertNames)
    decoder: DecoderNames = field(default_factory=DecoderNames)

    def __post_init__(self) -> None:
        missing = {"hf", "megatron"} - self.tables.keys()
        if missing:
            raise ConfigError(
                f"the family of model_type {', '.join(map(repr, self.model_types))} has no table for "
                f"{' and '.join(sorted(missing))}; give tables for hf and megatron, and for engine if plans support one"
            )
