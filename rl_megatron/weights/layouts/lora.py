"""Layouts of LoRA adapters, derived from those of the matrices beside which they stand. No row is written by hand.

A matrix that is cut along its rows has A whole and B cut alike; one that is cut along its columns has A cut alike and B
whole. A local matrix of several Hugging Face matrices (queries over keys and values, gate over up) has their As one
below the other, and one B, whose rows are in the order of its own. Names are those of peft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_megatron.config.sections.learner import Adaptable, LoraSection
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.layout import Band, Layout, ParamSpec, Piece, one

_LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight(\{expert\})?$")  # of megatron-core and delta nets
_WEIGHT = re.compile(r"weight(\{expert\}|\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A row of matrices with the rows of its adapters; ``parts`` are its Hugging Face matrices, in order."""

    base: ParamSpec
    a: ParamSpec
    b: ParamSpec
    parts: tuple[str, ...]
    rank: int


def adapter_name(weight: str, which: str) -> str:
    """The learner's name of a weight's adapter ``which``, "A" or "B"."""
    return _WEIGHT.sub(rf"lora_{which}\1", weight)


def hf_adapter_name(weight: str, which: str) -> str:
    """peft's name of a Hugging Face matrix's adapter, without its prefix ``base_model.model.``."""
    return f"{weight.removesuffix('.weight')}.lora_{which}.weight"


def adapted_rows(table: Sequence[ParamSpec], shape: ModelShape, lora: LoraSection) -> Iterator[Adapted]:
    """The rows of a table of the learner that have adapters."""
    ranks = lora.ranks(shape)
    for spec in table:
        if not spec.frozen and _LINEAR.search(spec.name) and (rank := ranks.get(_target(spec))) is not None:
            yield _adapted(spec, shape, rank, adapter_name)


def learner_adapters(layout: Layout, lora: LoraSection) -> Layout:
    """The adapters over the ranks of the learner's ``layout``; it has no rows without adapters."""
    found = adapted_rows(layout.rows(), layout.shape, lora)
    return replace(layout, table=[row for one in found for row in (one.a, one.b)])


def ranks_of_parts(learner: Layout, lora: LoraSection) -> Mapping[str, int]:
    """The rank of each Hugging Face matrix that has an adapter in the ``learner``'s layout, by its pattern."""
    return {part: one.rank for one in adapted_rows(learner.rows(), learner.shape, lora) for part in one.parts}


def hf_adapters(hf: Layout, ranks: Mapping[str, int]) -> Layout:
    """The adapters of the Hugging Face layout ``hf``, of ``ranks`` by matrix."""
    found = [
        _adapted(spec, hf.shape, ranks[name], hf_adapter_name)
        for spec in hf.rows()
        if (name := hf.first_chunk(spec)[0].hf) in ranks
    ]
    return replace(hf, table=[row for one in found for row in (one.a, one.b)])


def _target(spec: ParamSpec) -> Adaptable:
    if "{expert}" in spec.name:
        return "experts"
    return "attention" if ".self_attention." in spec.name else "mlp"


def _adapted(spec: ParamSpec, shape: ModelShape, rank: int, named: Callable[[str, str], str]) -> Adapted:
    pieces = [piece.hf for band in spec.bands(shape, 1) for piece in band]
    parts = tuple(dict.fromkeys(hf for hf in pieces if hf is not None))

    def whole(which: str, size: Callable[[ModelShape], int]) -> Callable[[ModelShape, int], tuple[Band, ...]]:
        names = [hf_adapter_name(part, which) for part in parts]
        return lambda m, _: tuple((Piece(hf=name, start=0, stop=size(m)),) for name in names)

    def cut(which: str) -> Callable[[ModelShape, int], tuple[Band, ...]]:
        return lambda m, degree: tuple(
            tuple(replace(piece, hf=piece.hf and hf_adapter_name(piece.hf, which)) for piece in band)
            for band in spec.bands(m, degree)
        )

    def of_rank(_m: ModelShape) -> tuple[int]:
        return (rank,)

    by_rows = spec.dim == 0
    assert by_rows or len(parts) == 1, f"{spec.name}: columns of several matrices"
    a, b = (replace(spec, name=named(spec.name, which), padded=False) for which in "AB")
    if by_rows:
        a = replace(a, bands=whole("A", lambda _: rank), axis=None, unit=one)
        b = replace(b, bands=cut("B"), others=of_rank)
    else:
        a = replace(a, bands=cut("A"), others=of_rank)
        b = replace(b, bands=whole("B", lambda m: spec.others(m)[0]), others=of_rank, dim=0, axis=None, unit=one)
    return Adapted(base=spec, a=a, b=b, parts=parts, rank=rank)
