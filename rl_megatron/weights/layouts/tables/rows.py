"""Functions that make the rows of any family's table: whole tensors, rows or columns cut by an axis, gate over up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.layouts.layout import Axis, Band, ParamSpec, Piece

Bands = Callable[[ModelShape, int], tuple[Band, ...]]
Size = Callable[[ModelShape], int]
Others = Callable[[ModelShape], Shape]
OfLayers = Callable[[ModelShape], Sequence[int]]

EMBED, HEAD, NORM, SCORE = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "score.weight"
LAYER, DECODER = "model.layers.{layer}.", "decoder.layers.{layer}."


def hidden(m: ModelShape) -> int:
    """Width of the residual stream."""
    return m.hidden_size


def vocab(m: ModelShape) -> int:
    """Rows of the embedding, unpadded."""
    return m.vocab_size


def num_experts(m: ModelShape) -> int:
    """Routed experts."""
    return m.num_experts


def expert_width(m: ModelShape) -> int:
    """Inner width of a routed expert."""
    return m.expert_width


def every_layer(m: ModelShape) -> range:
    """All decoder layers."""
    return range(m.num_layers)


def one(_m: ModelShape) -> int:
    """A unit of one row: rows may be cut anywhere."""
    return 1


def untied(m: ModelShape, _dims: ParallelDims) -> bool:
    """Whether there is an output matrix that is not tied to the embedding."""
    return not m.tie_embeddings and not m.scores


def tied_over_stages(m: ModelShape, dims: ParallelDims) -> bool:
    """Whether the last stage needs a copy of the embedding; with one stage megatron-core uses the embedding itself."""
    return m.tie_embeddings and dims.pp > 1


def has_score(m: ModelShape, _dims: ParallelDims) -> bool:
    """Whether the output is a score."""
    return m.scores


def whole(hf: str, rows: Size) -> Bands:
    """One band: all rows of one HF tensor."""
    return lambda m, _degree: ((Piece(hf=hf, start=0, stop=rows(m)),),)


def each(names: tuple[str, ...], rows: Size) -> Bands:
    """One band for each tensor, for example gate, then up; each is cut separately."""
    return lambda m, _degree: tuple((Piece(hf=name, start=0, stop=rows(m)),) for name in names)


def vector(
    name: str, hf: str, size: Size, *, stage: Literal["first", "last"] | None = None, layers: OfLayers = every_layer
) -> ParamSpec:
    """A norm's scale or a bias, replicated on every rank."""
    return ParamSpec(name=name, bands=whole(hf, size), others=_nothing, stage=stage, layers=layers)


def cut_vector(name: str, bands: Bands, *, unit: Size = one, layers: OfLayers = every_layer) -> ParamSpec:
    """A bias or a norm's scale that tp cuts like the rows that it belongs to."""
    return ParamSpec(name=name, bands=bands, others=_nothing, axis="tp", unit=unit, layers=layers)


def matrix(
    name: str,
    bands: Bands,
    *,
    columns: Size = hidden,
    axis: Axis | None = None,
    unit: Size = one,
    layers: OfLayers = every_layer,
) -> ParamSpec:
    """A matrix whose rows ``axis`` cuts."""
    return ParamSpec(name=name, bands=bands, others=lambda m: (columns(m),), axis=axis, unit=unit, layers=layers)


def row_cut(
    name: str,
    hf: str,
    columns: Size,
    *,
    axis: Axis | None = None,
    unit: Size = one,
    layers: OfLayers = every_layer,
) -> ParamSpec:
    """A matrix whose rows are the hidden size and whose columns ``axis`` cuts."""
    return ParamSpec(
        name=name,
        bands=whole(hf, columns),
        others=lambda m: (m.hidden_size,),
        dim=1,
        axis=axis,
        unit=unit,
        layers=layers,
    )


def vocabulary(
    name: str,
    hf: str,
    *,
    stage: Literal["first", "last"],
    exists: Callable[[ModelShape, ParallelDims], bool] | None = None,
) -> ParamSpec:
    """An embedding or output matrix, padded and cut by tp over the vocabulary."""
    spec = ParamSpec(
        name=name, bands=whole(hf, vocab), others=lambda m: (m.hidden_size,), axis="tp", stage=stage, padded=True
    )
    return spec if exists is None else replace(spec, exists=exists)


def under(prefix: str, spec: ParamSpec, *, named_so: bool, instead: str = "model.") -> ParamSpec:
    """The row for files whose names begin with ``prefix`` where others begin with ``instead``; with ``named_so`` its
    own name does, too."""

    def moved(name: str) -> str:
        return prefix + name.removeprefix(instead) if name.startswith(instead) else name

    def bands(m: ModelShape, degree: int) -> tuple[Band, ...]:
        return tuple(
            tuple(replace(piece, hf=None if piece.hf is None else moved(piece.hf)) for piece in band)
            for band in spec.bands(m, degree)
        )

    return replace(spec, name=moved(spec.name) if named_so else spec.name, bands=bands)


def _nothing(_m: ModelShape) -> Shape:
    return ()
