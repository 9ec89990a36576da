"""Builds an engine's layout, which plans read, from the boxes that its ranks' own loaders recorded. No torch.

Here a rank's box of a Hugging Face tensor counts as a tensor under the Hugging Face name; only the worker knows where
it is inside a stacked parameter (`places.Held`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from rl_megatron.errors import WeightError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, Shape, whole_box
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Slice

Boxes = Mapping[str, Box]
"""The boxes of one rank, by Hugging Face name."""


def boxes_of(said: Mapping[str, Sequence[Sequence[int]]]) -> Boxes:
    """Parse boxes from JSON."""
    return {name: tuple((low, high) for low, high in box) for name, box in said.items()}


_Holders = tuple[tuple[int, ...], ...]  # for each chunk the ranks that hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout(Layout):
    """A layout by `recorded_layout`: a row is a Hugging Face pattern, its chunks are the boxes that ranks hold of it.

    A layer's "stage", and an expert's "rank", is the index of its holders in ``holders``.
    """

    boxes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)  # of a pattern
    holders: tuple[_Holders, ...] = ()
    by_layer: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # of a pattern: layer -> holders
    by_expert: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @override
    def rows(self) -> list[ParamSpec]:
        return [ParamSpec(name=name, bands=_unused, others=_unused_sizes) for name in self.boxes]

    @override
    def chunks(self, spec: ParamSpec) -> list[list[Slice]]:
        out = []
        for box in self.boxes[spec.name]:
            shape = tuple(stop - start for start, stop in box)
            out.append([Slice(hf=spec.name, hf_box=box, param=spec.name, shape=shape, box=whole_box(shape))])
        return out

    @override
    def layer_stages(self, spec: ParamSpec) -> dict[int, tuple[int, ...]]:
        return {layer: (number,) for layer, number in self.by_layer[spec.name].items()}

    @override
    def expert_rank(self, spec: ParamSpec, expert: int) -> int:
        return self.by_expert.get(spec.name, {}).get(expert, 0)

    @override
    def ranks(self, spec: ParamSpec, chunk: int, stage: int, ep: int) -> list[int]:
        holders = self.holders[ep if "{expert}" in spec.name else stage]
        return list(holders[chunk]) if chunk < len(holders) else []

    @override
    def local_shapes(self, rank: int) -> dict[str, Shape]:
        return {
            spec.name.format(layer=layer, expert=expert): held[0].shape
            for spec in self.rows()
            for chunk, held in enumerate(self.chunks(spec))
            for layer, (stage,) in self.layer_stages(spec).items()
            for expert in self.by_expert.get(spec.name, {0: 0})
            if rank in self.ranks(spec, chunk, stage, self.expert_rank(spec, expert))
        }

    def _problems(self) -> Iterator[str]:
        return iter(())


def recorded_layout(hf: Layout, ranks: Sequence[Boxes]) -> EngineLayout:
    """The layout of engine ranks, from the boxes that each holds; ``hf`` is the checkpoint's layout.

    Raises WeightError that names a tensor that no rank holds, or a pattern whose layers are not cut alike.
    """
    boxes: dict[str, tuple[Box, ...]] = {}
    numbers: dict[_Holders, int] = {}
    by_layer: dict[str, dict[int, int]] = {}
    by_expert: dict[str, dict[int, int]] = {}
    for spec in hf.rows():
        for layer in hf.layer_stages(spec):
            for expert in range(hf.shape.num_experts if "{expert}" in spec.name else 1):
                name = spec.name.format(layer=layer, expert=expert)
                held = {
                    box: tuple(r for r, one in enumerate(ranks) if one.get(name) == box) for box in _of(ranks, name)
                }
                if not held:
                    raise WeightError(f"{name}: the engine's loader puts it on no rank")
                if boxes.setdefault(spec.name, tuple(held)) != tuple(held):
                    raise WeightError(f"{name}: the engine's ranks do not cut it like other layers or experts")
                number = numbers.setdefault(tuple(held.values()), len(numbers))
                by_layer.setdefault(spec.name, {}).setdefault(layer, number)
                if "{expert}" in spec.name and by_expert.setdefault(spec.name, {}).setdefault(expert, number) != number:
                    raise WeightError(f"{name}: the engine ranks that hold it are not the same as in other layers")
    return EngineLayout(
        table=(),
        shape=hf.shape,
        dims=ParallelDims(dp=len(ranks)),
        boxes=boxes,
        holders=tuple(numbers),
        by_layer=by_layer,
        by_expert=by_expert,
    )


def _of(ranks: Sequence[Boxes], name: str) -> list[Box]:
    return sorted({one[name] for one in ranks if name in one})


def _unused(_shape: ModelShape, _degree: int) -> tuple[()]:
    return ()


def _unused_sizes(_shape: ModelShape) -> Shape:
    return ()
