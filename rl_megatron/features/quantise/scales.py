"""The scales of quantised weights as tensors of a layout: whose blocks begin in whose boxes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import override

from rl_megatron.errors import ConfigError
from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.schemes import BLOCK, SCALES, is_quantised
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Slice, coordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a quantised matrix ``x``, ``rows`` by ``columns`` (None: all), each with a scale in ``x<suffix>``.

    Its numbers are in ``dtype``. The scales' shape is the `grid` of blocks.
    """

    dtype: DType
    suffix: str
    rows: int
    columns: int | None

    def edges(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a block of a matrix."""
        return self.rows, self.columns or shape[1]

    def grid(self, shape: Shape) -> Shape:
        """Number of blocks along both dims, the last ones of which may be cut short."""
        return tuple(-(-size // edge) for size, edge in zip(shape, self.edges(shape), strict=True))

    def touched(self, box: Box, shape: Shape) -> Box:
        """The blocks that have elements in a box."""
        edges = self.edges(shape)
        return tuple((low // edge, -(-high // edge)) for (low, high), edge in zip(box, edges, strict=True))

    def begun(self, box: Box, shape: Shape) -> Box:
        """The blocks whose first element is in a box. Boxes that tile a matrix so tile its scales."""
        edges = self.edges(shape)
        return tuple((-(-low // edge), -(-high // edge)) for (low, high), edge in zip(box, edges, strict=True))

    def kept(self, name: str, shape: Shape) -> bool:
        """Whether a tensor is left as it is. Raises ConfigError for stacked experts, which have no such format."""
        if len(shape) > 2 and shape[1] != 1:  # [channels, 1, kernel] is a depthwise convolution
            raise ConfigError(
                f"rollout.server.quantization: {name} {list(shape)} is not a matrix, and stacked experts cannot be "
                "quantised. Set rollout.server.quantization=none"
            )
        return not is_quantised(name, shape)


BLOCKS: Mapping[str, Blocks] = {
    "fp8": Blocks(dtype=DType.F8_E4M3, suffix=SCALES, rows=BLOCK, columns=BLOCK),
    "int8": Blocks(dtype=DType.I8, suffix="_scale", rows=1, columns=None),
}
"""The blocks of each rollout.server.quantization that has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLayout(Layout):
    """A layout by `with_scales`: that of ``base``, and for each row with quantised weights one of their scales.

    A rank has a tensor of a weight's scales if it holds a box of it, under the Hugging Face name, of the whole
    `Blocks.grid`. Of these it is the holder of those blocks that begin in its boxes.
    """

    base: Layout
    blocks: Blocks
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of quantised weights, by pattern
    of_weights: Mapping[str, ParamSpec] = field(default_factory=dict)  # by the name of the row of their scales

    @override
    def rows(self) -> list[ParamSpec]:
        return [*self.base.rows(), *(replace(spec, name=name) for name, spec in self.of_weights.items())]

    @override
    def chunks(self, spec: ParamSpec) -> list[list[Slice]]:
        weights = self.of_weights.get(spec.name)
        if weights is None:
            return self.base.chunks(spec)
        return [
            [scales for one in slices if (scales := self._scales(one)) is not None]
            for slices in self.base.chunks(weights)
        ]

    @override
    def first_chunk(self, spec: ParamSpec) -> list[Slice]:
        return self.chunks(spec)[0]

    @override
    def layer_stages(self, spec: ParamSpec) -> dict[int, tuple[int, ...]]:
        return self.base.layer_stages(self.of_weights.get(spec.name, spec))

    @override
    def expert_rank(self, spec: ParamSpec, expert: int) -> int:
        return self.base.expert_rank(self.of_weights.get(spec.name, spec), expert)

    @override
    def ranks(self, spec: ParamSpec, chunk: int, stage: int, ep: int) -> list[int]:
        return self.base.ranks(self.of_weights.get(spec.name, spec), chunk, stage, ep)

    @override
    def local_shapes(self, rank: int) -> dict[str, Shape]:
        scales = {name + self.blocks.suffix: self.blocks.grid(self.shapes[one.hf]) for one, name, _ in self.held(rank)}
        return self.base.local_shapes(rank) | scales

    def held(self, rank: int) -> Iterator[tuple[Slice, str, str]]:
        """The boxes of quantised weights that a rank holds, with names of the weight and of the parameter."""
        at = coordinates(self.dims, rank)
        for spec in self.of_weights.values():
            slices = [one for one in self.base.chunks(spec)[at.on(spec.axis)] if one.hf in self.shapes]
            experts = range(self.shape.num_experts if "{expert}" in spec.name else 1)
            mine = [e for e in experts if "{expert}" not in spec.name or self.base.expert_rank(spec, e) == at.ep]
            for layer, stages in self.base.layer_stages(spec).items():
                for expert in mine if at.pp in stages else ():
                    for one in slices:
                        name, param = (n.format(layer=layer, expert=expert) for n in (one.hf, one.param))
                        yield one, name, param

    def cut_weights(self) -> Iterator[tuple[str, Shape]]:
        """The weights of which some block is in several boxes, and their grids of blocks; the same on all ranks."""
        for spec in self.of_weights.values():
            slices = [one for chunk in self.base.chunks(spec) for one in chunk if one.hf in self.shapes]
            cut = dict.fromkeys(one.hf for one in slices if self._touched(one) != self._begun(one))
            for layer in self.base.layer_stages(spec):
                for expert in range(self.shape.num_experts if "{expert}" in spec.name else 1):
                    for hf in cut:
                        yield hf.format(layer=layer, expert=expert), self.blocks.grid(self.shapes[hf])

    def _touched(self, one: Slice) -> Box:
        return self.blocks.touched(one.hf_box, self.shapes[one.hf])

    def _begun(self, one: Slice) -> Box:
        return self.blocks.begun(one.hf_box, self.shapes[one.hf])

    def _scales(self, one: Slice) -> Slice | None:
        """The scales of the blocks that begin in a box; None if none do, or its tensor has no scales."""
        if one.hf not in self.shapes or any(low == high for low, high in self._begun(one)):
            return None
        grid, name = self.blocks.grid(self.shapes[one.hf]), one.hf + self.blocks.suffix
        return Slice(hf=name, hf_box=self._begun(one), param=name, shape=grid, box=self._begun(one))

    def _problems(self) -> Iterator[str]:
        return iter(())


def with_scales(layout: Layout, hf: Layout, blocks: Blocks | None) -> Layout:
    """The layout of quantised weights and their scales, of which ``hf`` is the checkpoint's; None: the same layout.

    Raises ConfigError for a model that has no such format.
    """
    if blocks is None:
        return layout
    whole = {one.hf: tuple(high for _, high in one.hf_box) for spec in hf.rows() for one in hf.chunks(spec)[0]}
    shapes = {name: shape for name, shape in whole.items() if not blocks.kept(name, shape)}
    of_weights = {
        spec.name + blocks.suffix: spec
        for spec in layout.rows()
        if any(one.hf in shapes for chunk in layout.chunks(spec) for one in chunk)
    }
    return ScaledLayout(
        table=(),
        shape=layout.shape,
        dims=layout.dims,
        base=layout,
        blocks=blocks,
        shapes=shapes,
        of_weights=of_weights,
    )
