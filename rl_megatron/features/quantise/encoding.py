"""Quantised weights in engine servers: the checkpoint that they have, and who writes it.

fp8 is DeepSeek-V3's checkpoint (weights/formats/schemes.py). int8 is compressed-tensors' "int-quantized" with a scale
for each output channel (vllm-project/compressed-tensors; vLLM's CompressedTensorsW8A8Int8): ``x.weight`` beside
``x.weight_scale``, float32 [rows, 1]. Both have the engine quantise activations token by token. Torch is imported as
numbers are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from rl_megatron.feature import Encoder, Encoding, load_side
from rl_megatron.features.quantise.scales import BLOCKS, Blocks, ScaledLayout, with_scales
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.hf_folder import Stored
from rl_megatron.weights.formats.schemes import SCALES, is_quantised, quantization_config
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import Layout, Slice
from rl_megatron.weights.layouts.learner import engine_layout

if TYPE_CHECKING:
    from torch import Tensor

    from rl_megatron.config.run import RunConfig
    from rl_megatron.models.shape import ModelShape

_ROOM = "rl_megatron.features.quantise"


def _blocked(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    beside = [(name + SCALES, shape) for name, shape in shapes.items() if is_quantised(name, shape)]
    return quantization_config([*shapes.items(), *beside])


def _by_channel(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and not is_quantised(name, shape)]
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
class Quantisation(Encoding):
    """Weights in the format ``kind``, a key of `BLOCKS`."""

    kind: str

    @property
    def blocks(self) -> Blocks:
        """Of each matrix that is quantised."""
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
        return {"fp8": _blocked, "int8": _by_channel}[self.kind](shapes)

    @override
    def layout(self, layout: Layout, hf: Layout) -> Layout:
        return with_scales(layout, hf, self.blocks)

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
        made: Encoder = load_side(f"{_ROOM}.sender:Quantiser")(self._numbers(), layout, rank, tensors)
        return made

    def _numbers(self) -> Any:
        return load_side(f"{_ROOM}.formats:FORMATS")[self.kind]

    @property
    @override
    def tolerance(self) -> float:
        return 1.0


ENCODINGS: Mapping[str, Quantisation | None] = {"none": None, **{kind: Quantisation(kind) for kind in BLOCKS}}
"""The encoding of each rollout.server.quantization."""


def encoding(config: RunConfig) -> Encoding | None:
    """The encoding of a run's weights."""
    return ENCODINGS[config.rollout.server.quantization]


def block_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """A line for each weight whose blocks the servers' ranks, or the parts of a fused parameter, would cut.

    vLLM 0.32.0 (validate_fp8_block_shape) and SGLang 0.5.21 (fp8.py) end at their start; vLLM would make smaller blocks
    of the experts' scales, which a push cannot fill.
    """
    server, blocks = config.rollout.server, BLOCKS.get(config.rollout.server.quantization)
    ranks = engine_layout(config, shape) if blocks is not None else None
    if not config.rollout.served or blocks is None or blocks.columns is None or ranks is None:
        return
    scaled = with_scales(ranks, hf_layout(shape), blocks)
    assert isinstance(scaled, ScaledLayout)
    found: dict[str, str] = {}
    for spec in scaled.of_weights.values():
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
    """How a rank's box of a weight of shape ``whole`` is cut inside a block; with ``ends`` the last may be shorter."""
    for what, (low, high), size, edge in zip(("rows", "columns"), one.hf_box, whole, blocks.edges(whole), strict=True):
        uncut = (low, high) == (0, size) and (ends or what == "columns")
        if (high - low) % edge and not uncut:
            return f"{high - low} of the {size} {what} of {one.hf}"
    return ""
