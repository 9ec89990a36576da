"""Computes checksums of the learner's boxes, as engines receive them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.checks.checksums import aligned, box_checksums
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.layouts.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """``place`` of a learner's ``param`` is ``box`` of Hugging Face tensor ``hf``, whose shape is ``whole``."""

    param: str
    place: Box
    hf: str
    box: Box
    whole: Shape


def sources_of(layout: Layout, hf: Layout) -> list[list[Source]]:
    """The boxes that each learner rank checksums: those of which it is the first holder."""
    shapes: Mapping[str, Shape] = hf.local_shapes(0)
    out: list[list[Source]] = [[] for _ in range(layout.dims.world_size)]
    for spec in layout.rows():
        for chunk, slices in enumerate(layout.chunks(spec)):
            for layer, stages in layout.layer_stages(spec).items():
                for expert in range(layout.shape.num_experts if "{expert}" in spec.name else 1):
                    ep = layout.expert_rank(spec, expert)
                    rank = min(r for stage in stages for r in layout.ranks(spec, chunk, stage, ep))
                    for one in slices:
                        name, param = (n.format(layer=layer, expert=expert) for n in (one.hf, one.param))
                        whole = shapes[name]
                        out[rank].append(Source(param=param, place=one.box, hf=name, box=one.hf_box, whole=whole))
    return out


def sent_checksums(
    sources: Sequence[Source], tensors: Mapping[str, Tensor], sent: Callable[[Source, Tensor], Tensor]
) -> Report:
    """Checksums of what engines receive of the learner's boxes: ``sent`` makes it of a box's values."""
    started = time.perf_counter()
    added: list[Source] = []

    def boxes() -> Iterator[tuple[Tensor, Shape, tuple[int, ...]]]:
        for one in sources:
            box = sent(one, tensors[one.param].detach()[tuple(slice(low, high) for low, high in one.place)])
            if add_up([one], box.dtype.itemsize):
                added.append(one)
                yield box, one.whole, tuple(low for low, _ in one.box)

    sums = box_checksums(boxes())
    rows = [(one.param, one.hf, one.box, found) for one, found in zip(added, sums, strict=True)]
    return Report(rows=rows, seconds=time.perf_counter() - started)


def add_up(sources: Sequence[Source], itemsize: int) -> bool:
    """Whether all boxes are made of whole words, so that their checksums add up to those of the tensors."""
    return all(len(one.whole) < 2 or aligned(one.whole, one.box[1], itemsize) for one in sources)
