"""Quantized weights in engine servers: their checkpoint, its scales in layouts, and its writer.

fp8 is DeepSeek-V3's checkpoint (weights/formats/schemes.py). int8 is compressed-tensors' "int-quantized" with a scale
for each output channel (vllm-project/compressed-tensors; vLLM's CompressedTensorsW8A8Int8): ``x.weight`` and
``x.weight_scale``, float32 [rows, 1]. With both the engine quantizes activations token by token. Scales are tensors of
a layout, for the blocks that begin in a rank's boxes. Torch is imported when numbers are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from rl_megatron.errors import ConfigError
from rl_megatron.feature import Encoder, Encoding, load_side
from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.hf_folder import Stored
from rl_megatron.weights.formats.schemes import BLOCK, SCALES, is_quantized, quantization_config
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Slice, coordinates
from rl_megatron.weights.layouts.learner import engine_layout

if TYPE_CHECKING:
    from torch import Tensor

    from rl_megatron.config.run import RunConfig
    from rl_megatron.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a quantized matrix ``x``, ``rows`` by ``columns`` (None: all), each with a scale in ``x<suffix>``.

    Its numbers are in ``dtype``. The scales' shape is the `grid` of blocks.
    """

    dtype: DType
    suffix: str
    rows: int
    columns: int | None

    def edges(self, shape: Shape) -> tuple[int, int]:
        """Returns rows and columns of a block of a matrix."""
        return self.rows, self.columns or shape[1]

    def grid(self, shape: Shape) -> Shape:
        """Returns the number of blocks along both dims. The last blocks may be cut short."""
        return tuple(-(-size // edge) for size, edge in zip(shape, self.edges(shape), strict=True))

    def touched(self, box: Box, shape: Shape) -> Box:
        """Returns the blocks that have elements in a box."""
        edges = self.edges(shape)
        return tuple((low // edge, -(-high // edge)) for (low, high), edge in zip(box, edges, strict=True))

    def owned_blocks(self, box: Box, shape: Shape) -> Box:
        """Returns the blocks with their first element in a box. Boxes that tile a matrix thus tile its scales."""
        edges = self.edges(shape)
        return tuple((-(-low // edge), -(-high // edge)) for (low, high), edge in zip(box, edges, strict=True))

    def kept(self, name: str, shape: Shape) -> bool:
        """True if a tensor is not quantized. Raises ConfigError for stacked experts, which have no such format."""
        if len(shape) > 2 and shape[1] != 1:  # [channels, 1, kernel] is a depthwise convolution
            raise ConfigError(
                f"rollout.server.quantization: {name} {list(shape)} is not a matrix, and stacked experts cannot be "
                "quantized. Set rollout.server.quantization=none"
            )
        return not is_quantized(name, shape)


BLOCKS: Mapping[str, Blocks] = {
    "fp8": Blocks(dtype=DType.F8_E4M3, suffix=SCALES, rows=BLOCK, columns=BLOCK),
    "int8": Blocks(dtype=DType.I8, suffix="_scale", rows=1, columns=None),
}
"""The blocks of each rollout.server.quantization that has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLayout(Layout):
    """A layout by `add_scale_rows`: that of ``base``, and for each row with quantized weights one of their scales.

    A rank that holds a box of a weight has a tensor of its scales, under the Hugging Face name, of the whole
    `Blocks.grid`. It is the holder of the scales of those blocks that begin in its boxes.
    """

    base: Layout
    blocks: Blocks
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # pattern of a quantized weight -> its shape
    scale_rows: Mapping[str, ParamSpec] = field(default_factory=dict)  # name of the scales' row -> row of the weights

    @override
    def rows(self) -> list[ParamSpec]:
        return [*self.base.rows(), *(replace(spec, name=name) for name, spec in self.scale_rows.items())]

    @override
    def chunks(self, spec: ParamSpec) -> list[list[Slice]]:
        weights = self.scale_rows.get(spec.name)
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
        return self.base.layer_stages(self.scale_rows.get(spec.name, spec))

    @override
    def expert_rank(self, spec: ParamSpec, expert: int) -> int:
        return self.base.expert_rank(self.scale_rows.get(spec.name, spec), expert)

    @override
    def ranks(self, spec: ParamSpec, chunk: int, stage: int, ep: int) -> list[int]:
        return self.base.ranks(self.scale_rows.get(spec.name, spec), chunk, stage, ep)

    @override
    def local_shapes(self, rank: int) -> dict[str, Shape]:
        scales = {name + self.blocks.suffix: self.blocks.grid(self.shapes[one.hf]) for one, name, _ in self.held(rank)}
        return self.base.local_shapes(rank) | scales

    def held(self, rank: int) -> Iterator[tuple[Slice, str, str]]:
        """Yields the boxes of quantized weights that a rank holds, with names of the weight and of the parameter."""
        at = coordinates(self.dims, rank)
        for spec in self.scale_rows.values():
            slices = [one for one in self.base.chunks(spec)[at.index_on(spec.axis)] if one.hf in self.shapes]
            experts = range(self.shape.num_experts if "{expert}" in spec.name else 1)
            mine = [e for e in experts if "{expert}" not in spec.name or self.base.expert_rank(spec, e) == at.ep]
            for layer, stages in self.base.layer_stages(spec).items():
                for expert in mine if at.pp in stages else ():
                    for one in slices:
                        name, param = (n.format(layer=layer, expert=expert) for n in (one.hf, one.param))
                        yield one, name, param

    def cut_weights(self) -> Iterator[tuple[str, Shape]]:
        """Yields weights with a block in several boxes, and their grids of blocks; the same on all ranks."""
        for spec in self.scale_rows.values():
            slices = [one for chunk in self.base.chunks(spec) for one in chunk if one.hf in self.shapes]
            cut = dict.fromkeys(one.hf for one in slices if self._touched(one) != self._owned_blocks(one))
            for layer in self.base.layer_stages(spec):
                for expert in range(self.shape.num_experts if "{expert}" in spec.name else 1):
                    for hf in cut:
                        yield hf.format(layer=layer, expert=expert), self.blocks.grid(self.shapes[hf])

    def _touched(self, one: Slice) -> Box:
        return self.blocks.touched(one.hf_box, self.shapes[one.hf])

    def _owned_blocks(self, one: Slice) -> Box:
        return self.blocks.owned_blocks(one.hf_box, self.shapes[one.hf])

    def _scales(self, one: Slice) -> Slice | None:
        """Returns the scales of the blocks that begin in a box; None if none do, or its tensor has no scales."""
        if one.hf not in self.shapes or any(low == high for low, high in self._owned_blocks(one)):
            return None
        grid, name = self.blocks.grid(self.shapes[one.hf]), one.hf + self.blocks.suffix
        return Slice(hf=name, hf_box=self._owned_blocks(one), param=name, shape=grid, box=self._owned_blocks(one))

    def _problems(self) -> Iterator[str]:
        return iter(())


def add_scale_rows(layout: Layout, hf: Layout, blocks: Blocks) -> ScaledLayout:
    """Returns the layout of quantized weights and their scales; ``hf`` is the checkpoint's layout.

    Raises ConfigError for a model that has no such format.
    """
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
        scale_rows=of_weights,
    )


_ROOM = "rl_megatron.features.quantize"


def _blocked(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    beside = [(name + SCALES, shape) for name, shape in shapes.items() if is_quantized(name, shape)]
    return quantization_config([*shapes.items(), *beside])


def _channel_config(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and not is_quantized(name, shape)]
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": sorted(name.removesuffix(".weight") for name in matrices),
    }


@dataclass(frozen=True, slots=True)
class Quantization(Encoding):
    """Weights in the format ``kind``, a key of `BLOCKS`."""

    kind: str

    @property
    def blocks(self) -> Blocks:
        """The blocks of each matrix that is quantized."""
        return BLOCKS[self.kind]

    @override
    def stored(self, entries: Stored) -> Stored:
        out: dict[str, tuple[DType, Shape]] = {}
        for name, (dtype, shape) in entries.items():
            if self.blocks.kept(name, shape):
                out[name] = dtype, shape
            else:
                out[name] = self.blocks.dtype, shape
                out[name + self.blocks.suffix] = DType.F32, self.blocks.grid(shape)
        return out

    @override
    def config(self, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        return {"fp8": _blocked, "int8": _channel_config}[self.kind](shapes)

    @override
    def layout(self, layout: Layout, hf: Layout) -> Layout:
        return add_scale_rows(layout, hf, self.blocks)

    @override
    def write(self, name: str, values: Tensor, held: Mapping[str, Tensor]) -> tuple[float, float] | None:
        scales = held.get(name + self.blocks.suffix)
        if scales is not None:
            change: tuple[float, float] = self._numbers().write(name, values, held[name], scales)
            return change
        held[name].copy_(values)
        return None

    @override
    def encoder(self, layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> Encoder:
        encoder: Encoder = load_side(f"{_ROOM}.formats:Quantizer")(self._numbers(), layout, rank, tensors)
        return encoder

    def _numbers(self) -> Any:
        return load_side(f"{_ROOM}.formats:FORMATS")[self.kind]

    @property
    @override
    def tolerance(self) -> float:
        return 1.0


ENCODINGS: Mapping[str, Quantization | None] = {"none": None, **{kind: Quantization(kind) for kind in BLOCKS}}
"""The encoding of each rollout.server.quantization."""


def encoding(config: RunConfig) -> Encoding | None:
    """Returns the encoding of a run's weights."""
    return ENCODINGS[config.rollout.server.quantization]


def block_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Yields a line for each weight with blocks that servers' ranks, or the parts of a fused parameter, would cut.

    vLLM 0.32.0 (validate_fp8_block_shape) and SGLang 0.5.21 (fp8.py) exit at their start; vLLM would make smaller
    blocks of the experts' scales, which a push cannot fill.
    """
    server, blocks = config.rollout.server, BLOCKS.get(config.rollout.server.quantization)
    ranks = engine_layout(config, shape) if blocks is not None else None
    if not config.rollout.served or blocks is None or blocks.columns is None or ranks is None:
        return
    scaled = add_scale_rows(ranks, hf_layout(shape), blocks)
    found: dict[str, str] = {}
    for spec in scaled.scale_rows.values():
        for slices in ranks.chunks(spec):
            for i, one in enumerate(slices):
                ends = i == len(slices) - 1 and (i == 0 or "{expert}" not in spec.name)  # may end inside a block
                if one.hf in scaled.shapes and (told := _cut_block(one, scaled.shapes[one.hf], blocks, ends=ends)):
                    found.setdefault(one.hf, told)
    given = f"rollout.server.quantization={server.quantization} with tp={server.tp}, dp={server.dp}, ep={server.ep}"
    ways = ["lower rollout.server.tp or dp", "set rollout.server.quantization=none"]
    whole = f"set rollout.server.ep={server.tp * server.dp}, so that ranks have whole experts"
    for hf, told in found.items():
        fixes = [*ways[:1], *([whole] if "{expert}" in hf and server.ep == 1 else []), *ways[1:]]
        why = f"a rank of the servers has {told}, no multiple of a block's {blocks.rows}"
        yield f"{given}: {why}; {', or '.join(fixes)}"


def _cut_block(one: Slice, whole: Shape, blocks: Blocks, *, ends: bool) -> str:
    """Describes the rows or columns of a rank's box that cut a block; with ``ends`` the last block may be shorter."""
    for what, (low, high), size, edge in zip(("rows", "columns"), one.hf_box, whole, blocks.edges(whole), strict=True):
        uncut = (low, high) == (0, size) and (ends or what == "columns")
        if (high - low) % edge and not uncut:
            return f"{high - low} of the {size} {what} of {one.hf}"
    return ""
