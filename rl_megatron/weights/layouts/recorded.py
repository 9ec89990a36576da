"""Builds an engine's layout, which plans read, from the boxes that its ranks' own loaders recorded. No torch.

Here a rank's box of a Hugging Face tensor counts as a tensor under the Hugging Face name. Only the worker knows where
it is inside a stacked parameter (`places.ParameterBox`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from rl_megatron.errors import WeightError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, Shape, whole_box
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Slice

Boxes = Mapping[str, Box]
"""The boxes of one rank, by Hugging Face name."""


def shared(ranks: Iterable[Boxes]) -> list[Boxes]:
    """The boxes of each rank, with equal ones as one object: a pickle holds it once, for all servers alike."""
    known: dict[Hashable, Any] = {}
    several: list[Boxes] = []
    out = []
    for boxes in ranks:
        same = next((one for one in several if one == boxes), None)
        if same is None:
            same = {known.setdefault(name, name): known.setdefault(box, box) for name, box in boxes.items()}
            several.append(same)
        out.append(same)
    return out


_Holders = tuple[tuple[int, ...], ...]  # the ranks that hold each box
_Place = tuple[int, int]  # a layer and an expert, or the classes of both


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The holders of a Hugging Face pattern, for every layer and expert.

    Layers that the same ranks hold, expert by expert, are one class, and so are experts.
    """

    boxes: tuple[Box, ...]
    layers: Mapping[int, int]  # the class of a layer
    experts: Mapping[int, int]
    holders: Mapping[_Place, _Holders]  # key: the classes of a layer and an expert


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout(Layout):
    """A layout by `recorded_layout`: a row is a Hugging Face pattern, its chunks are the boxes that ranks hold of it.

    A layer's "stage", and an expert's "rank", is its class in the row.
    """

    by_name: Mapping[str, _Row] = field(default_factory=dict)

    @override
    def rows(self) -> list[ParamSpec]:
        return [ParamSpec(name=name, bands=lambda m, degree: (), other_axes=lambda m: ()) for name in self.by_name]

    @override
    def chunks(self, spec: ParamSpec) -> list[list[Slice]]:
        out = []
        for box in self.by_name[spec.name].boxes:
            shape = tuple(stop - start for start, stop in box)
            out.append([Slice(hf=spec.name, hf_box=box, param=spec.name, shape=shape, box=whole_box(shape))])
        return out

    @override
    def layer_stages(self, spec: ParamSpec) -> dict[int, tuple[int, ...]]:
        return {layer: (number,) for layer, number in self.by_name[spec.name].layers.items()}

    @override
    def expert_rank(self, spec: ParamSpec, expert: int) -> int:
        return self.by_name[spec.name].experts[expert]

    @override
    def ranks(self, spec: ParamSpec, chunk: int, stage: int, ep: int) -> list[int]:
        return list(self.by_name[spec.name].holders[stage, ep][chunk])

    @override
    def local_shapes(self, rank: int) -> dict[str, Shape]:
        return {
            name.format(layer=layer, expert=expert): tuple(stop - start for start, stop in box)
            for name, row in self.by_name.items()
            for chunk, box in enumerate(row.boxes)
            for layer, stage in row.layers.items()
            for expert, ep in row.experts.items()
            if rank in row.holders[stage, ep][chunk]
        }

    def _problems(self) -> Iterator[str]:
        return iter(())


def recorded_layout(hf: Layout, ranks: Sequence[Boxes]) -> EngineLayout:
    """The layout of engine ranks, from the boxes that each holds; ``hf`` is the checkpoint's layout.

    Raises WeightError that names a tensor that no rank holds, or a pattern whose layers are not cut alike.
    """
    held: dict[str, dict[Box, list[int]]] = {}
    equal: dict[int, list[int]] = {}  # ranks by their boxes, if these are `shared`
    for rank, boxes in enumerate(ranks):
        equal.setdefault(id(boxes), []).append(rank)
    for several in equal.values():
        for name, box in ranks[several[0]].items():
            held.setdefault(name, {}).setdefault(box, []).extend(several)
    return EngineLayout(
        table=(),
        shape=hf.shape,
        dims=ParallelDims(dp=len(ranks)),
        by_name={
            spec.name: _row(
                spec.name, list(hf.layer_stages(spec)), hf.shape.num_experts if "{expert}" in spec.name else 1, held
            )
            for spec in hf.rows()
        },
    )


def _row(pattern: str, layers: Sequence[int], experts: int, held: Mapping[str, Mapping[Box, Sequence[int]]]) -> _Row:
    boxes: tuple[Box, ...] | None = None
    holders: dict[_Place, _Holders] = {}
    for layer in layers:
        for expert in range(experts):
            name = pattern.format(layer=layer, expert=expert)
            if name not in held:
                raise WeightError(f"{name}: the engine's loader puts it on no rank")
            found = sorted(held[name].items())
            boxes = boxes or tuple(box for box, _ in found)
            if boxes != tuple(box for box, _ in found):
                raise WeightError(f"{name}: the engine's ranks do not cut it like other layers or experts")
            holders[layer, expert] = tuple(tuple(sorted(ranks)) for _, ranks in found)
    by_layer = _classes({layer: tuple(holders[layer, e] for e in range(experts)) for layer in layers})
    by_expert = _classes({e: tuple(holders[layer, e] for layer in layers) for e in range(experts)})
    return _Row(
        boxes=boxes or (),
        layers=by_layer,
        experts=by_expert,
        holders={(by_layer[layer], by_expert[e]): ranks for (layer, e), ranks in holders.items()},
    )


def _classes(keys: Mapping[int, Hashable]) -> dict[int, int]:
    """A number for each index; equal keys get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return {index: numbers.setdefault(key, len(numbers)) for index, key in keys.items()}
