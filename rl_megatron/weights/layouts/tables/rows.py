"""Functions that make the rows of any family's table: whole tensors, rows or columns cut by an axis, gate over up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Literal

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.layouts.layout import Axis, Band, ParamSpec, Piece, every_layer, one

Bands = Callable[[ModelShape, int], tuple[Band, ...]]
Size = Callable[[ModelShape], int]
Others = Callable[[ModelShape], Shape]
OfLayers = Callable[[ModelShape], Sequence[int]]

EMBED, HEAD, NORM, SCORE = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "score.weight"
LAYER, DECODER = "model.layers.{layer}.", "decoder.layers.{layer}."


hidden: Size = attrgetter("hidden_size")
"""Width of the residual stream."""
vocab: Size = attrgetter("vocab_size")
"""Rows of the embedding, unpadded."""
num_experts: Size = attrgetter("num_experts")
"""Routed experts."""
expert_width: Size = attrgetter("expert_width")
"""Inner width of a routed expert."""


def untied(m: ModelShape, _dims: ParallelDims) -> bool:
    """True if there is an output matrix that is not tied to the embedding."""
    return not m.tie_embeddings and not m.has_score_head


def tied_over_stages(m: ModelShape, dims: ParallelDims) -> bool:
    """True if the last stage needs a copy of the embedding; with one stage megatron-core uses the embedding itself."""
    return m.tie_embeddings and dims.pp > 1


def has_score(m: ModelShape, _dims: ParallelDims) -> bool:
    """True if the output is a score."""
    return m.has_score_head


def whole(hf: str, rows: Size) -> Bands:
    """Makes one band of all rows of one HF tensor."""
    return lambda m, _degree: ((Piece(hf=hf, start=0, stop=rows(m)),),)


def stacked(*parts: tuple[str, Size]) -> Bands:
    """Makes one band of all rows of several tensors, one below the other."""
    return lambda m, _degree: (tuple(Piece(hf=hf, start=0, stop=rows(m)) for hf, rows in parts),)


def each(names: tuple[str, ...], rows: Size) -> Bands:
    """Makes one band for each tensor, for example gate, then up; each is cut separately."""
    return lambda m, _degree: tuple((Piece(hf=name, start=0, stop=rows(m)),) for name in names)


def vector(
    name: str, hf: str, size: Size, *, stage: Literal["first", "last"] | None = None, layers: OfLayers = every_layer
) -> ParamSpec:
    """A norm's scale or a bias, replicated on every rank."""
    return ParamSpec(name=name, bands=whole(hf, size), other_axes=lambda m: (), stage=stage, layers=layers)


def cut_vector(name: str, bands: Bands, *, unit: Size = one, layers: OfLayers = every_layer) -> ParamSpec:
    """A bias or a norm's scale that tp cuts like the rows that it belongs to."""
    return ParamSpec(name=name, bands=bands, other_axes=lambda m: (), axis="tp", unit=unit, layers=layers)


def matrix(
    name: str,
    bands: Bands,
    *,
    columns: Size = hidden,
    axis: Axis | None = None,
    unit: Size = one,
    layers: OfLayers = every_layer,
) -> ParamSpec:
    """A matrix with rows that ``axis`` cuts."""
    return ParamSpec(name=name, bands=bands, other_axes=lambda m: (columns(m),), axis=axis, unit=unit, layers=layers)


def row_cut(
    name: str,
    hf: str,
    columns: Size,
    *,
    axis: Axis | None = None,
    unit: Size = one,
    layers: OfLayers = every_layer,
) -> ParamSpec:
    """A matrix [hidden size, ``columns``]; ``axis`` cuts its columns."""
    return replace(matrix(name, whole(hf, columns), axis=axis, unit=unit, layers=layers), dim=1)


def vocabulary(
    name: str,
    hf: str,
    *,
    stage: Literal["first", "last"],
    exists: Callable[[ModelShape, ParallelDims], bool] = lambda m, dims: True,
) -> ParamSpec:
    """An embedding or output matrix, padded and cut by tp over the vocabulary."""
    return replace(matrix(name, whole(hf, vocab), axis="tp"), stage=stage, padded=True, condition=exists)


def under(prefix: str, spec: ParamSpec, *, named_so: bool, instead: str = "model.") -> ParamSpec:
    """The row for files with names that begin with ``prefix`` where others begin with ``instead``; with ``named_so``
    its own name does, too."""

    def moved(name: str) -> str:
        return prefix + name.removeprefix(instead) if name.startswith(instead) else name

    def bands(m: ModelShape, degree: int) -> tuple[Band, ...]:
        return tuple(
            tuple(replace(piece, hf=None if piece.hf is None else moved(piece.hf)) for piece in band)
            for band in spec.bands(m, degree)
        )

    return replace(spec, name=moved(spec.name) if named_so else spec.name, bands=bands)
